#include "store/table.hpp"

#include <algorithm>
#include <charconv>
#include <iterator>

#include "store/wire.hpp"

namespace phalanx::store {
namespace {

int64_t integer(const std::string& key, const std::string& text) {
  if (text.empty()) return 0;
  int64_t value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size())
    throw Failure(Kind::Invalid, "add: the value of '" + key +
                                     "' is not a 64-bit integer; use add only on keys made by add, "
                                     "or set to a decimal number");
  return value;
}

struct ThreadTicket : Table::Ticket {
  using Ticket::Ticket;
  void answered() override {
    done = true;
    // Under the table's lock, so that the waiting thread cannot destroy this before the call
    // returns.
    ready.notify_one();
  }
  std::condition_variable ready;
  bool done = false;
};

}  // namespace

class Table::Locked {
 public:
  explicit Locked(Table& table) : table_(table), lock_(table.mutex_.here()) {
    if (!table.origin_.is_here()) adopt();
    table.in_use_ = true;
  }
  ~Locked() { table_.in_use_ = false; }

 private:
  // A forked child has a copy, which is whole if nobody was at it, and in which nobody waits.
  void adopt() {
    if (table_.in_use_)
      throw Failure(Kind::Store,
                    "another thread was using the store when this process was forked, so its "
                    "content is not known here: make a store of the child's own");
    table_.waiting_.clear();
    table_.touched_.clear();
    table_.origin_ = Origin();
  }

  Table& table_;
  std::lock_guard<std::mutex> lock_;
};

void Table::touch(const std::string& key) {
  if (waiting_.contains(key)) touched_.push_back(key);
}

void Table::check_size(const char* what, size_t bytes, const char* advice) const {
  if (bytes + wire::overhead > max_reply_)
    throw Failure(Kind::Invalid, std::string(what) + " of " + std::to_string(bytes) +
                                     " bytes is more than the " + std::to_string(max_reply_) +
                                     " that a store sends at once; " + advice);
}

// A barrier is an arrival, counted once, and a wait for the key of its round. One request does
// both, so that a process may end as soon as it is through: the others' requests are already in the
// table.
const std::string* Table::arrive(Request& request) {
  auto& done = request.values;
  if (done.empty()) {
    auto& arrived = values_[request.keys[0] + "/arrived"];
    int64_t count;
    if (__builtin_add_overflow(integer(request.keys[0], arrived), 1, &count))
      throw Failure(Kind::Invalid, "barrier: '" + request.keys[0] + "/arrived' leaves 64 bits");
    arrived = std::to_string(count);
    // Whoever comes after a full house belongs to the next round.
    done.push_back(request.keys[0] + "/round/" + std::to_string((count - 1) / request.number));
    if (count % request.number == 0) {
      touch(done[0]);
      values_[done[0]];
    }
  }
  return values_.contains(done[0]) ? nullptr : &done[0];
}

const std::string* Table::apply(Request& request, Reply& reply) {
  auto& keys = request.keys;
  auto& values = request.values;
  size_t bytes = 0;  // of the reply
  switch (request.op) {
    case Op::Set:
      for (size_t i = 0; i < keys.size(); ++i) {
        touch(keys[i]);
        values_[keys[i]] = std::move(values[i]);
      }
      break;
    case Op::Get:
      for (auto& key : keys)
        if (lacks(request, key)) return &key;
      for (auto& key : keys) bytes += wire::size(values_.at(key));
      check_size("get: a reply", bytes, "ask for fewer keys");
      for (auto& key : keys) reply.values.push_back(values_.at(key));
      break;
    case Op::Add: {
      auto found = values_.find(keys[0]);
      int64_t old = found == values_.end() ? 0 : integer(keys[0], found->second);
      if (__builtin_add_overflow(old, request.number, &reply.number))
        throw Failure(Kind::Invalid, "add: '" + keys[0] + "' is " + std::to_string(old) +
                                         ", and adding " + std::to_string(request.number) +
                                         " leaves 64 bits");
      touch(keys[0]);
      values_[keys[0]] = std::to_string(reply.number);
      break;
    }
    case Op::Append: {
      auto found = values_.find(keys[0]);
      // Nobody could get a value that is longer than a reply.
      check_size("append: a value",
                 wire::size(values[0]) + (found == values_.end() ? 0 : found->second.size()),
                 "append to another key");
      touch(keys[0]);
      values_[keys[0]] += values[0];
      break;
    }
    case Op::Check:
      reply.number = std::ranges::none_of(keys, [&](auto& key) { return lacks(request, key); });
      break;
    case Op::Wait:
      for (auto& key : keys)
        if (lacks(request, key)) return &key;
      break;
    case Op::CompareSet: {
      auto found = values_.find(keys[0]);
      bool absent = found == values_.end();
      if (absent ? values[0].empty() : found->second == values[0]) {
        touch(keys[0]);
        reply.values.push_back(values_[keys[0]] = std::move(values[1]));
      } else {
        reply.values.push_back(absent ? values[0] : found->second);
      }
      break;
    }
    case Op::Delete:
      reply.number = static_cast<int64_t>(values_.erase(keys[0]));
      break;
    case Op::NumKeys:
      reply.number = static_cast<int64_t>(values_.size());
      break;
    case Op::ListKeys:
      for (auto& [key, value] : values_) bytes += wire::size(key);
      check_size("list_keys: a reply", bytes, "delete keys that nobody needs");
      for (auto& [key, value] : values_) reply.values.push_back(key);
      break;
    case Op::Push:
      touch(keys[0]);
      queues_[keys[0]].push_back(std::move(values[0]));
      break;
    case Op::Pop: {
      auto found = queues_.find(keys[0]);
      if (found == queues_.end()) {
        if (request.number) return &keys[0];
        reply.status = Status::QueueEmpty;
        break;
      }
      reply.values.push_back(std::move(found->second.front()));
      found->second.pop_front();
      if (found->second.empty()) queues_.erase(found);
      break;
    }
    case Op::Length: {
      auto found = queues_.find(keys[0]);
      reply.number = found == queues_.end() ? 0 : static_cast<int64_t>(found->second.size());
      break;
    }
    case Op::Barrier:
      return arrive(request);
    default:
      break;  // validate() let none through
  }
  return nullptr;
}

// Applies the request if it can be and answers it, or parks it under the key that it misses.
void Table::settle(Ticket& ticket) {
  try {
    validate(ticket.request);
    ticket.missing = apply(ticket.request, ticket.reply);
    if (ticket.missing) return waiting_[*ticket.missing].push_back(&ticket);
  } catch (const Failure& failure) {
    ticket.reply = {Status::Invalid, 0, {failure.what()}};
  }
  ticket.answered();
}

// Retries those who wait for the keys that appeared. They may touch further keys in turn (none of
// the waiting operations does today), and park again under another key.
void Table::wake() {
  for (size_t i = 0; i < touched_.size(); ++i) {
    auto node = waiting_.extract(touched_[i]);
    if (node.empty()) continue;
    for (Ticket* ticket : node.mapped()) {
      ticket->missing = nullptr;
      settle(*ticket);
    }
  }
  touched_.clear();
}

void Table::submit(Ticket& ticket) {
  Locked lock(*this);
  settle(ticket);
  wake();
}

bool Table::withdraw(Ticket& ticket) {
  Locked lock(*this);
  if (!ticket.missing) return false;
  auto found = waiting_.find(*std::exchange(ticket.missing, nullptr));
  std::erase(found->second, &ticket);
  if (found->second.empty()) waiting_.erase(found);
  ticket.reply = cancelled(ticket.request);
  return true;
}

Reply Table::cancelled(const Request& request) {
  Reply reply{Status::Cancelled};
  std::ranges::copy_if(request.keys, std::back_inserter(reply.values),
                       [&](auto& key) { return lacks(request, key); });
  return reply;
}

std::optional<Reply> Table::attempt(Request& request) {
  Locked lock(*this);
  validate(request);
  Reply reply;
  if (apply(request, reply)) return std::nullopt;
  wake();
  return reply;
}

Reply Table::run(Request request, const Patience& patience) {
  const Origin origin;
  ThreadTicket ticket(std::move(request));
  submit(ticket);
  try {
    std::unique_lock lock(mutex_.here());
    while (!ticket.done && !patience.exhausted()) {
      ticket.ready.wait_until(lock, patience.look_up(), [&] { return ticket.done; });
      if (ticket.done || !patience.check) continue;
      lock.unlock();
      patience.check();
      lock.lock();
    }
  } catch (...) {
    if (origin.is_here()) withdraw(ticket);
    throw;
  }
  withdraw(ticket);
  return accepted(std::move(ticket.reply), ticket.request, patience, "");
}

}  // namespace phalanx::store
