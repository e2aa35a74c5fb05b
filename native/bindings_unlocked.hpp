// Work without the interpreter's lock.
#pragma once

#include <Python.h>
#include <unistd.h>

inline bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing();
#else
  return _Py_IsFinalizing();
#endif
}

// Gives the lock to other threads for the length of a block. A daemon thread that wants it back
// while the interpreter ends stays here until the process is gone: before 3.14 Python would unwind
// its stack, which ends a C++ program on the spot.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() {
    while (is_finalizing() && ::getpid() != ::gettid()) ::pause();
    PyEval_RestoreThread(state_);
  }
  Unlocked(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};
