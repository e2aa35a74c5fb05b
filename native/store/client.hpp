// A store that lives in another process, reached over TCP.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "store/socket.hpp"
#include "store/store.hpp"

namespace phalanx::store {

// A request that has an answer travels on a connection of its own, taken from a pool: a thread that
// waits for a key does not hold up another one. One that has none (a set) is posted: it is on its
// way when the call returns, and whatever this process asks next, in any thread, comes after it.
class Client : public Store {
 public:
  // Connects once, trying until the patience ends, so that a wrong address or secret is known at
  // once.
  Client(std::string host, int port, std::string secret, const Patience& patience);

  Reply run(Request request, const Patience& patience) override;

 private:
  struct Connection {
    Descriptor socket;
    std::string in;
    size_t filled = 0, used = 0;  // of `in`: what was received, what the last frame took
  };
  using Lease = std::unique_ptr<Connection>;
  // A forked child makes connections of its own.
  struct Connections {
    std::timed_mutex mutex;
    std::vector<Lease> idle;
    Lease posted;  // where requests were posted that the server may not have seen yet
  };

  void post(const std::string& bytes, const Patience& patience);
  Lease ask(const std::string& bytes, const Patience& patience);
  std::unique_lock<std::timed_mutex> lock(Connections& all, const Patience& patience);
  Lease take_idle(Connections& all);
  void give_back(Lease connection);
  Lease connect(const Patience& patience, bool retry) const;
  bool introduce(Connection& connection, const Patience& patience) const;
  void send(Connection& connection, std::string_view bytes, const Patience& patience) const;
  // The next frame, valid until the next call; none if the patience ended.
  bool receive(Connection& connection, const Patience& patience, std::string_view& frame) const;
  [[noreturn]] void lost(const std::string& why) const;

  const std::string host_;
  const int port_;
  const std::string secret_;
  const std::string where_;
  PerProcess<Connections> connections_;
};

}  // namespace phalanx::store
