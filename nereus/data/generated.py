"""Records from a Python function: `package.module:function` or `path/to/file.py:function`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from nereus.data.files import Record
from nereus.errors import DataError, explain


def generate_records(function: str, arguments: Mapping[str, object]) -> Iterator[Record]:
    """The records that the function's iterable yields when it is called with `arguments`.

    Runs in this process, once, before anything starts; the iterable must end. Raises DataError if the
    function can't be found, raises, or yields anything but mappings.
    """
    produce = load_function(function)
    try:
        made = produce(**arguments)
        if not isinstance(made, Iterable):
            raise DataError(
                explain(
                    f"cannot use {function}",
                    values=f"it returned a {type(made).__name__}",
                    rule="it must return an iterable of records",
                )
            )
        for number, values in enumerate(made, start=1):
            if not isinstance(values, Mapping):
                raise DataError(
                    explain(
                        f"cannot use record {number} of {function}",
                        values=f"it is a {type(values).__name__}",
                        rule='each record must be a mapping such as {"prompt": ..., "answer": ...}',
                    )
                )
            yield Record(where=f"{function} record {number}", values=values)
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            explain(
                f"cannot generate prompts with {function}",
                values=f"{type(error).__name__}: {error}; arguments {dict(arguments)}",
            )
        ) from error


def load_function(target: str) -> Callable[..., object]:
    """The function named `package.module:function` or `path/to/file.py:function`; DataError where there is
    none.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise DataError(
            explain(
                f"cannot find a function by {target!r}",
                rule="the form is package.module:function or path/to/file.py:function",
            )
        )
    try:
        module = _module_of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        found = getattr(module, name)
    except (OSError, ImportError, AttributeError, SyntaxError) as error:
        raise DataError(
            explain(
                f"cannot load {target!r}",
                values=f"{type(error).__name__}: {error}",
                remedy=f"check the name; paths are relative to {Path.cwd()}",
            )
        ) from error
    if not callable(found):
        raise DataError(explain(f"cannot call {target!r}", values=f"it is a {type(found).__name__}"))
    return found  # type: ignore[no-any-return]  # callable() narrows to Callable[..., object]


def _module_of_file(path: Path) -> object:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    spec = importlib.util.spec_from_file_location(f"prompts_{path.stem}", path)
    assert spec is not None, f"no loader for {path}"
    assert spec.loader is not None, f"no loader for {path}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there while it is still being run
    sys.path.insert(0, str(path.resolve().parent))  # its siblings, while it is imported
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module
