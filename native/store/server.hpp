// The TCP server of a store: one native thread, so it answers while the interpreter is busy.
#pragma once

#include <atomic>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "store/handshake.hpp"
#include "store/socket.hpp"
#include "store/table.hpp"

namespace phalanx::store {

class Server {
 public:
  struct Limits {
    double handshake = 10;  // seconds from connecting to being let in
    double frame = 60;      // seconds for a frame to arrive, or for a reply to be taken
    size_t connections = 65536;
    // Those who have not proved yet that they belong here: how many there may be at once, and the
    // seconds that each has for itself. After that the oldest makes room for a newcomer.
    size_t strangers = 64;
    double courtesy = 0.25;
  };

  // To be made by make_here: a forked child has its object but not its thread.
  Server(Descriptor listener, std::string secret, const Limits& limits);
  ~Server();
  Server(const Server&) = delete;

  int port() const { return port_; }

 private:
  struct Connection;

  void serve();
  void accept_all();
  void pause();
  void resume();
  bool has_room_for_strangers();
  bool drop_oldest_stranger();
  bool make_room();
  void refuse(const Descriptor& socket, bool for_want_of_descriptors);
  void receive(Connection& connection);
  void handle(Connection& connection, std::string_view frame);
  void greet(Connection& connection, std::string_view frame);
  void verify(Connection& connection, std::string_view frame);
  void flush(Connection& connection);
  void flush_answered();
  void drop(Connection& connection);
  void sweep();
  void watch(Connection& connection, bool writable);

  const std::string secret_;
  const Limits limits_;
  Descriptor listener_, epoll_, stop_;
  Descriptor spare_;  // given up to tell a newcomer that there are no others
  const int port_;

  // Below: only the server's thread.
  Table table_{wire::max_frame};
  std::list<Connection*> strangers_;                                  // the oldest first
  std::unordered_map<int, std::unique_ptr<Connection>> connections_;  // by descriptor
  std::vector<std::unique_ptr<Connection>> dropped_;  // kept until the events at hand are done with
  std::vector<Connection*> answered_;                 // have a reply to flush
  std::string scratch_;
  bool accepting_ = true;
  bool ticking_ = false;  // some connection has a deadline

  std::thread thread_;
};

}  // namespace phalanx::store
