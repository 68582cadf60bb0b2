"""Imports zerofix in every Python below ``zerofix run``, after the user's own sitecustomize.

Python runs the first ``sitecustomize`` on its path at start-up. ``zerofix run`` puts this folder
there, through ``PYTHONPATH``, which children inherit.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from os.path import dirname, realpath


def run_the_next() -> None:
    """Run the sitecustomize that there would be without this one.

    Only what comes later on the path is looked at, so that two that run each other come to an end.
    """
    here = realpath(dirname(__file__))
    last = max([i for i, entry in enumerate(sys.path) if realpath(entry) == here], default=-1)
    spec = PathFinder.find_spec("sitecustomize", sys.path[last + 1 :])
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def import_zerofix() -> None:
    try:
        import zerofix  # noqa: F401
    except ImportError as error:
        # Another Python than that of `zerofix run`. Most of those do not train.
        if find_spec("deepspeed") is not None:
            place = f"{sys.executable}, whose DeepSpeed stays as it is"
            sys.stderr.write(f"zerofix: not installed for {place}: {error}\n")
    except ValueError as error:
        # The import system would report it and go on: a misspelt toggle must not mean "off".
        raise SystemExit(f"zerofix: {error}") from None


try:
    run_the_next()
finally:
    import_zerofix()
