// The one exception type of the core. The bindings turn it into the Python class of the same kind.
#pragma once

#include <stdexcept>
#include <string>

namespace phalanx {

enum class Kind {
  Invalid,     // ValueError: an argument breaks a rule
  Backend,     // DistBackendError
  Mismatch,    // CollectiveMismatch
  PeerFailed,  // PeerFailed
  Deadlock,    // Deadlock
  Timeout,     // DistTimeout
  Network,     // DistNetworkError
  Store,       // DistStoreError
  StoreTimeout,
  QueueEmpty,
  Memory,  // MemoryError
};

struct Failure : std::runtime_error {
  Kind kind;
  Failure(Kind kind, const std::string& message) : std::runtime_error(message), kind(kind) {}
};

}  // namespace phalanx
