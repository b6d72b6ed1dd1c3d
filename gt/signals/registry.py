"""The configuration of this process, from files and Python; later entries replace earlier ones."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

from gt.core.errors import SignalError
from gt.core.settings import read_settings
from gt.core.tracebacks import ends_on_users_line
from gt.signals.checks import misspelt_of, name_problem, show
from gt.signals.config import Config, SignalConfig, at
from gt.signals.parser import parse_config, read_config
from gt.signals.resolution import backward_chain, cycle_text, unknown_backward


class Registry:
    """The configuration and its version. Readers take one immutable `Config`; only a change takes the lock. Beneath the
    configuration of this process lie the defaults of the server that it has joined."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._lock = threading.RLock()
        self._config = Config()  # the two that follow, merged
        self._own = Config()
        self._defaults = Config()
        self._version = 0
        self._is_started = False
        self.entered: dict[str, int] = {}
        """The names that the program has entered, each with the version for which it was checked last."""
        self._warned: set[str] = set()

    @property
    def version(self) -> int:
        """A number that grows with every change, for caches of values derived from the configuration."""
        self._start()
        return self._version

    def current(self) -> Config:
        self._start()
        return self._config

    def get(self, name: str) -> SignalConfig | None:
        return self.current().signals.get(name)

    def load(self, path: str | os.PathLike[str]) -> Config:
        """Add the configuration of a file, and return it. A file with an error changes nothing."""
        with self._lock:
            return self._add(read_config(path, self.current().signals))

    def register(self, name: str, config: SignalConfig) -> None:
        if problem := name_problem(name, "the name of a signal"):
            raise SignalError(problem)
        if not isinstance(config, SignalConfig):
            raise SignalError(f"signal {name!r} has to be a SignalConfig(shard=ShardConfig(...)), not {show(config)}")
        with self._lock:
            self._start()
            self._add(Config({name: config}))

    def add(self, config: Config) -> None:
        """Add a configuration that was made in Python."""
        with self._lock:
            self._start()
            self._add(config)

    def clear(self) -> None:
        """Remove all configuration, that of GT_CONFIG included."""
        with self._lock:
            self._is_started = True
            self._own = self._defaults = self._config = Config()
            self._version += 1
            self.entered.clear()
            self._warned.clear()

    def set_defaults(self, text: str, file: str = "") -> None:
        """Use a configuration, as text of a file, for names that this process does not configure itself. An empty text
        ends that."""
        with self._lock:
            if not text and not self._is_started:  # the end of a program whose GT_CONFIG cannot be read
                return
            self._start()
            self._defaults = parse_config(text, file) if text else Config()
            self._merge()

    def enter(self, name: str) -> list[str]:
        """Note that the program enters a signal. Returns what it should be warned of, each warning once: a name like a
        configured one, and a backward signal without a configuration. Raises SignalError if its backward signals go in
        a circle."""
        if self.entered.get(name) == self.version:
            return []
        signals = self._config.signals
        *before, last = backward_chain(name, lambda key: signals[key].backward_signal if key in signals else None)
        where = f"{at(signals[before[-1]].source)}signal {before[-1]!r}: " if before else ""
        if last in before:
            raise SignalError(f"{where}{cycle_text([*before[before.index(last) :], last])}")
        self.entered[name] = self._version
        found = []
        if before and last not in signals:
            found.append(f"{where}{unknown_backward(last, signals)}")
        elif name not in signals and (close := misspelt_of(name, signals)):
            found.append(f"signal {name!r} is not configured and changes nothing; did you mean {close!r}?")
        new = [text for text in found if text not in self._warned]
        self._warned.update(new)
        return new

    def _start(self) -> None:
        """Read GT_CONFIG on first use. An error is raised each time until the file is correct."""
        if self._is_started:
            return
        with self._lock:
            if not self._is_started:
                # this variable alone: the others are checked when GT starts, which warns of unknown ones once
                path = read_settings({key: text for key, text in self._environ.items() if key == "GT_CONFIG"}).config
                if path:
                    try:
                        self._add(read_config(path))
                    except SignalError as error:
                        raise SignalError(f"{error}\n(this file is named by GT_CONFIG)") from None
                self._is_started = True

    def _add(self, added: Config) -> Config:
        self._own = Config({**self._own.signals, **added.signals}, added.model or self._own.model)
        self._merge()
        return added

    def _merge(self) -> None:
        before, defaults = self._config, self._defaults
        self._config = Config({**defaults.signals, **self._own.signals}, self._own.model or defaults.model)
        self._version += self._config != before


registry = Registry()


@ends_on_users_line
def load_config(path: str | os.PathLike[str]) -> Config:
    """Read signals, and the layout of a model, from a YAML file. They replace earlier configuration of the same names,
    from the next op on. Returns the configuration of the file.

    >>> from pathlib import Path
    >>> written = Path("plan.yaml").write_text("forward: {shard: {axis: 0}}")
    >>> config = gt.load_config("plan.yaml")
    >>> config.signals["forward"].shard.axis
    0
    """
    return registry.load(path)


@ends_on_users_line
def register_config(name: str, config: SignalConfig) -> None:
    """Configure a signal: `gt.register_config("forward", SignalConfig(shard=ShardConfig(axis=0)))`. Replaces earlier
    configuration of the name, from the next op on. Its `backward_signal` may be registered later, or never: a signal
    without a configuration changes nothing.

    >>> gt.register_config("forward", gt.SignalConfig(shard=gt.ShardConfig(axis=0)))
    >>> gt.get_signal_config("forward").shard.axis
    0
    """
    registry.register(name, config)


def get_config() -> Config:
    """The current configuration.

    >>> gt.register_config("forward", gt.SignalConfig(compile=True))
    >>> list(gt.get_config().signals)
    ['forward']
    """
    return registry.current()


def get_signal_config(name: str) -> SignalConfig | None:
    """The configuration of a signal, or None.

    >>> gt.register_config("forward", gt.SignalConfig(compile=True))
    >>> gt.get_signal_config("forward").compile, gt.get_signal_config("other")
    (True, None)
    """
    return registry.get(name)
