// What every store is: something that answers requests, now or once the keys they need exist.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "failure.hpp"

namespace phalanx::store {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

// The numbers are part of the protocol between processes.
enum class Op : uint8_t {
  Set,         // keys[i] = values[i]
  Get,         // wait for every key, answer their values
  Add,         // keys[0] += number, answer the sum
  Append,      // keys[0] += values[0]
  Check,       // answer whether every key exists
  Wait,        // wait for every key
  CompareSet,  // if keys[0] == values[0] then keys[0] = values[1]; answer what it is now
  Delete,      // answer whether keys[0] existed
  NumKeys,
  ListKeys,
  Push,     // put values[0] at the end of queue keys[0]
  Pop,      // take the front of queue keys[0]; number says whether to wait for one
  Length,   // answer the length of queue keys[0]
  Barrier,  // wait until `number` requests have come to keys[0]; values[0] is set once this one has
  Cancel,   // TCP only: stop waiting for the request under way on this connection
  Join,     // files only: one more user
  Leave,    // files only: one user less
  Count
};

struct Request {
  Op op;
  int64_t number = 0;
  std::vector<std::string> keys = {};
  std::vector<std::string> values = {};
};

enum class Status : uint8_t { Ok, Invalid, QueueEmpty, Cancelled, Count };

struct Reply {
  Status status = Status::Ok;
  int64_t number = 0;
  // What was asked for; Invalid: the reason; Cancelled: the keys that were missing.
  std::vector<std::string> values = {};
};

// How long a call may wait, and what it asks in between (a signal handler's turn, say).
// `check` may throw; the call is then given up and the exception passes through.
struct Patience {
  explicit Patience(double seconds, void (*check)() = nullptr)
      : seconds(seconds),
        deadline(Clock::now() +
                 std::chrono::duration_cast<Clock::duration>(
                     std::chrono::duration<double>(std::clamp(seconds, 0.0, forever)))),
        check(check) {}

  double seconds;
  Clock::time_point deadline;
  void (*check)();

  static constexpr double forever = 1e9;  // half a lifetime, and no overflow of the clock
  static constexpr auto slice = 100ms;

  // The moment at which a blocked call should look up next.
  Clock::time_point look_up() const {
    return check ? std::min(deadline, Clock::now() + slice) : deadline;
  }
  bool exhausted() const { return Clock::now() >= deadline; }
};

// One key-value store. Implementations may be used by many threads at once; each request is atomic.
class Store {
 public:
  virtual ~Store() = default;

  // Answers the request, or throws Failure: StoreTimeout when it had to wait for too long,
  // QueueEmpty, Invalid, or what the transport met.
  virtual Reply run(Request request, const Patience& patience) = 0;
};

// Throws Invalid unless the request has as many keys and values as its operation takes.
void validate(const Request& request);

// Whether the operation has nothing to answer: over TCP it is sent, and not waited for.
constexpr bool posts(Op op) { return op == Op::Set; }

// The names of the first few keys, for messages.
std::string quoted(const std::vector<std::string>& keys);

// The reply if it is Ok, or the exception that it stands for. `where` ends a message: the server,
// the file.
Reply accepted(Reply reply, const Request& request, const Patience& patience,
               const std::string& where);

}  // namespace phalanx::store
