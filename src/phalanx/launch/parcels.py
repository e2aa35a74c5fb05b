"""What travels between a launcher and the processes of its ranks: pickled, tensors by value.

Functions and classes travel by name, and by value, with cloudpickle, where the other process would
not find the name: those of a notebook cell or a prompt, lambdas, functions inside functions. Such
a parcel, too, is opened by `pickle.loads`.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from phalanx import extras


def pack(content: object) -> bytes:
    """Pickle something for another process; what cannot be sent raises TypeError."""
    buffer = io.BytesIO()
    try:
        _ByName(buffer).dump(content)
        return buffer.getvalue()
    except Exception as error:
        try:
            cloudpickle: Any = importlib.import_module("cloudpickle")
        except ImportError:
            raise TypeError(
                f"{error}; functions and classes that other processes cannot import, as those of a "
                f"notebook, a prompt or another function, need cloudpickle: "
                f"{extras.install('notebook')}"
            ) from error
    try:
        by_value: bytes = cloudpickle.dumps(content)
    except Exception as error:
        raise TypeError(str(error)) from None
    return by_value


class _ByName(pickle.Pickler):
    """Refuses names in a main module that another process cannot import again."""

    def reducer_override(self, obj: Any) -> Any:
        if (
            isinstance(obj, (type, types.FunctionType))
            and obj.__module__ == "__main__"
            and not _main_is_a_file()
        ):
            raise pickle.PicklingError(f"{obj.__qualname__} is in no file that can be imported")
        return NotImplemented


def _main_is_a_file() -> bool:
    """Tell whether multiprocessing can import the main module again in a new process."""
    main = sys.modules["__main__"]
    if getattr(getattr(main, "__spec__", None), "name", None) is not None:
        return True
    return os.path.isfile(getattr(main, "__file__", None) or "")


@contextmanager
def main_as_it_is() -> Iterator[None]:
    """Have multiprocessing know, meanwhile, that a main module such as "<stdin>" is no file."""
    names = vars(sys.modules["__main__"])
    hidden = {} if _main_is_a_file() or "__file__" not in names else {"__file__": names["__file__"]}
    for name in hidden:
        del names[name]
    try:
        yield
    finally:
        names.update(hidden)
