"""``zfun demo``: one model under every composition, with what each of them costs."""

from zfun.demo._run import run

__all__ = ["run"]
