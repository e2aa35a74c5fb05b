// The key-value table: all semantics of a store, once. A HashStore is a table; a TCP server answers
// from one; a FileStore replays its log into one.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "fork.hpp"
#include "store/store.hpp"

namespace phalanx::store {

class Table : public Store {
 public:
  // A request under way. answered() is called once, with the table locked, when `reply` is there:
  // either inside submit() or inside the submit() of another request that made it possible.
  struct Ticket {
    explicit Ticket(Request request) : request(std::move(request)) {}
    virtual ~Ticket() = default;
    virtual void answered() = 0;

    Request request;
    Reply reply;
    const std::string* missing = nullptr;  // waiting in the table for this string of the request
  };

  // A reply that would take more bytes than `max_reply` is refused before it is made.
  explicit Table(size_t max_reply = SIZE_MAX) : max_reply_(max_reply) {}

  Reply run(Request request, const Patience& patience) override;

  // Hands a request in. It is answered in order of arrival among those waiting for the same key.
  void submit(Ticket& ticket);
  // Takes a request back if it is still waiting: its reply is then Cancelled, and answered() not
  // called.
  bool withdraw(Ticket& ticket);

  // Answers at once, or gives nothing if the request has to wait.
  std::optional<Reply> attempt(Request& request);
  // The answer to a request that has waited for too long: it names the keys that are still missing.
  Reply cancelled(const Request& request);

 private:
  // The key that the request misses, or none once it has been applied and `reply` filled.
  const std::string* apply(Request& request, Reply& reply);
  const std::string* arrive(Request& request);
  void touch(const std::string& key);
  // Throws Invalid if strings of so many bytes in all, lengths included, do not fit in a reply.
  void check_size(const char* what, size_t bytes, const char* advice) const;
  // Whether the request cannot do without this key. A queue satisfies wait and check, not get.
  bool lacks(const Request& request, const std::string& key) const {
    return !(request.op != Op::Pop && values_.contains(key)) &&
           !(request.op != Op::Get && queues_.contains(key));
  }
  void settle(Ticket& ticket);
  void wake();

  // Locks the table to look at it and change it.
  class Locked;

  const size_t max_reply_;
  PerProcess<std::mutex> mutex_;
  Origin origin_;
  std::atomic<bool> in_use_ = false;  // by somebody who has locked it
  std::unordered_map<std::string, std::string> values_;
  std::unordered_map<std::string, std::deque<std::string>> queues_;  // none of them is empty
  std::unordered_map<std::string, std::list<Ticket*>> waiting_;      // by the first key missing
  std::vector<std::string> touched_;  // keys that appeared and that somebody waits for
};

// Whether replaying the request changes a table.
constexpr bool mutates(Op op) {
  return op == Op::Set || op == Op::Add || op == Op::Append || op == Op::CompareSet ||
         op == Op::Delete || op == Op::Push || op == Op::Pop || op == Op::Barrier;
}

}  // namespace phalanx::store
