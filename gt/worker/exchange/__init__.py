"""Exchanges of tensors between workers."""

from gt.worker.exchange.in_process import MemoryExchange
from gt.worker.exchange.interface import Exchange
from gt.worker.exchange.process_exchange import ProcessExchange, shares_memory

__all__ = ["Exchange", "MemoryExchange", "ProcessExchange", "shares_memory"]
