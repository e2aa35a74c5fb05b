"""A system that denies calls to a program, as containers and old kernels do, for tests."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_SECCOMP_MODE_FILTER = 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06

# Numbers of system calls: x86-64, and the common table of newer architectures.
_NUMBERS = {
    "sched_setaffinity": (203, 122),
    "memfd_create": (319, 279),
    "pidfd_open": (434, 434),
    "prctl": (157, 167),
}


def deny(name: str, code: int = errno.EPERM) -> None:
    """Have a system call fail in this process, and in all that it starts, from now on."""
    number = _NUMBERS[name][platform.machine() != "x86_64"]
    program = [
        (_LOAD, 0, 0, 0),  # the number of the call
        (_JUMP_IF_EQUAL, 0, 1, number),
        (_RETURN, 0, 0, _ERRNO | code),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code_ = b"".join(struct.pack("HBBI", *line) for line in program)
    text = ctypes.create_string_buffer(code_)
    filter_ = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(text)))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, filter_, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp is not to be had")
