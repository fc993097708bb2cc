"""Decorators with which users declare rules for operators: docs/writing_rules.md."""

from normpass.decomps.user_rules import batching, decomposition, derivative

__all__ = ["batching", "decomposition", "derivative"]
