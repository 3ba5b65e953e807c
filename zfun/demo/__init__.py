"""``zfun demo``: one model under every composition, and the cost of each."""

from zfun.demo._run import run

__all__ = ["run"]
