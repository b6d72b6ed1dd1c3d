"""Exchanges of tensors between workers."""

from gt.worker.exchange.in_process_exchange import InProcessExchange
from gt.worker.exchange.interface import Exchange
from gt.worker.exchange.process_exchange import ProcessExchange, shares_memory

__all__ = ["Exchange", "InProcessExchange", "ProcessExchange", "shares_memory"]
