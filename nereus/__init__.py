"""Nereus: reinforcement-learning post-training that changes its parallelism while it runs.

Importing this package is cheap: it loads neither torch, Ray nor Prefect (`tests/test_layout.py` holds that).
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("nereus-rl")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+source"

__all__ = ["__version__"]
