"""Imported last by a fork server: Ctrl-C, kept from it until then, is what it was.

One that has come meanwhile is forgotten here: the process that started the server has it too.
"""

from __future__ import annotations

import signal

_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
signal.signal(signal.SIGINT, _handler)
