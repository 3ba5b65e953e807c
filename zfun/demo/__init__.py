"""``zfun demo``: one model under every composition; and the commands that measure and plan."""

from zfun.demo._hw_bench import hw_bench, measure_hardware
from zfun.demo._io_bench import io_bench
from zfun.demo._mesh_plan import mesh_plan
from zfun.demo._mesh_search import mesh_search
from zfun.demo._plan import machine_of, plan
from zfun.demo._run import run
