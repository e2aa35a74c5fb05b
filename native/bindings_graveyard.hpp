// Python objects that calls keep alive, and letting go of them without the interpreter's lock.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "fork.hpp"

namespace phalanx {

// Objects that a finished call no longer needs. The thread that finishes it may not hold the
// interpreter's lock and must not wait for it, so they are put down here for the next one that
// does.
class Graveyard {
 public:
  static void bury(PyObject* object) {
    Buried& buried = here();
    std::lock_guard lock(buried.mutex);
    buried.objects.push_back(object);
    full() = true;
  }
  static void empty() {
    if (!full().load(std::memory_order_relaxed)) return;
    std::vector<PyObject*> dead;
    {
      Buried& buried = here();
      std::lock_guard lock(buried.mutex);
      dead.swap(buried.objects);
      full() = false;
    }
    for (PyObject* object : dead) Py_DECREF(object);
  }
  static std::shared_ptr<void> keep(nanobind::handle object) {
    return {object.inc_ref().ptr(), [](void* kept) { bury(static_cast<PyObject*>(kept)); }};
  }

 private:
  struct Buried {
    std::mutex mutex;
    std::vector<PyObject*> objects;
  };
  static Buried& here() {
    static auto& processes = *new PerProcess<Buried>;
    return processes.here();
  }
  static std::atomic<bool>& full() {
    static auto& instance = *new std::atomic<bool>;
    return instance;
  }
};

}  // namespace phalanx
