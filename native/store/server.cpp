#include "store/server.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <new>

namespace phalanx::store {
namespace {

constexpr auto never = Clock::time_point::max();
constexpr size_t scratch_size = size_t{64} << 10;

Clock::time_point after(double seconds) { return Patience(seconds).deadline; }

constexpr int pause_ms = 20;  // between looks at whether a stranger's time is up

// The soft limit on descriptors of this process.
rlim_t descriptor_limit() {
  rlimit limit{};
  return getrlimit(RLIMIT_NOFILE, &limit) ? RLIM_INFINITY : limit.rlim_cur;
}

// Most systems let a process have more descriptors than it starts with.
bool raise_descriptor_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur >= limit.rlim_max) return false;
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, limit.rlim_cur * 2);
  return !setrlimit(RLIMIT_NOFILE, &limit);
}

// Whether a new socket takes what the process may need for itself. The kernel gives the lowest
// number that is free, so as many descriptors as its number are in use.
bool is_of_reserve(int fd) {
  const rlim_t limit = descriptor_limit();
  return static_cast<rlim_t>(fd) + std::clamp<rlim_t>(limit / 8, 4, 32) >= limit;
}

Descriptor make_spare() { return Descriptor(eventfd(0, EFD_CLOEXEC)); }

// A buffer that once held something huge does not keep the memory.
void reset(std::string& buffer) {
  buffer.clear();
  if (buffer.capacity() > 4 * scratch_size) buffer.shrink_to_fit();
}

}  // namespace

// A client. It sends any number of requests that have no answer, then one that has, and waits for
// the reply: so no more than one reply is ever held for it. Only a Cancel may come in between.
struct Server::Connection : Table::Ticket {
  Connection(Descriptor socket, Server& server, Clock::time_point deadline)
      : Ticket(Request{}), socket(std::move(socket)), server(server), deadline(deadline) {}

  void answered() override {
    busy = false;
    server.answered_.push_back(this);
  }

  size_t frame_limit() const { return state == Ready ? wire::max_frame : handshake::max_frame; }

  Descriptor socket;
  Server& server;
  enum { Hello, Proof, Ready } state = Hello;
  Digest client_nonce, server_nonce;
  std::string in, out;
  size_t sent = 0;        // of `out`
  bool busy = false;      // its request is in the table
  bool writable = false;  // epoll watches for room to write
  bool dropped = false;
  Clock::time_point deadline;
  const Clock::time_point arrival = Clock::now();
  std::list<Connection*>::iterator place;  // among the strangers, until the state is Ready
};

Server::Server(Descriptor listener, std::string secret, const Limits& limits)
    : secret_(std::move(secret)),
      limits_(limits),
      listener_(std::move(listener)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      spare_(make_spare()),
      port_(port_of(listener_)),
      scratch_(scratch_size, '\0') {
  epoll_event wake{EPOLLIN, {.ptr = &stop_}}, knock{EPOLLIN, {.ptr = &listener_}};
  if (epoll_ctl(epoll_.fd(), EPOLL_CTL_ADD, stop_.fd(), &wake) ||
      epoll_ctl(epoll_.fd(), EPOLL_CTL_ADD, listener_.fd(), &knock))
    throw Failure(Kind::Network,
                  "cannot start the store's server: no descriptors left; raise 'ulimit -n'");
  thread_ = std::thread([this] { serve(); });
}

Server::~Server() {
  uint64_t one = 1;
  static_cast<void>(!::write(stop_.fd(), &one, sizeof one));
  thread_.join();
}

void Server::serve() {
  pthread_setname_np(pthread_self(), "phalanx-store");
  // Signals are for the threads of the interpreter.
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, nullptr);
  const double shortest = std::min(limits_.handshake, limits_.frame);
  const int tick = static_cast<int>(std::clamp(shortest * 1000 / 4, 1.0, 1000.0));
  auto next_sweep = Clock::now();
  epoll_event events[64];
  for (;;) {
    const int slice = accepting_ ? tick : std::min(tick, pause_ms);
    int count = epoll_wait(epoll_.fd(), events, 64, ticking_ ? slice : -1);
    for (int i = 0; i < count; ++i) {
      void* source = events[i].data.ptr;
      if (source == &stop_) return;
      if (source == &listener_) {
        accept_all();
        continue;
      }
      auto& connection = *static_cast<Connection*>(source);
      if (connection.dropped) continue;
      try {
        if (events[i].events & EPOLLOUT) flush(connection);
        if (!connection.dropped && events[i].events & ~EPOLLOUT) receive(connection);
      } catch (const wire::Malformed&) {
        drop(connection);
      } catch (const std::bad_alloc&) {
        drop(connection);
      } catch (const Failure&) {  // no random numbers for the handshake
        drop(connection);
      }
    }
    dropped_.clear();
    if (ticking_ && Clock::now() >= next_sweep) {
      sweep();
      next_sweep = Clock::now() + std::chrono::milliseconds(slice);
    }
  }
}

void Server::accept_all() {
  for (;;) {
    if (!has_room_for_strangers()) {
      pollfd knock{listener_.fd(), POLLIN, 0};
      if (poll(&knock, 1, 0) < 1) return;  // nobody needs the room
      if (!drop_oldest_stranger()) return pause();
    }
    Descriptor socket(accept4(listener_.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EAGAIN) return;
      if (make_room()) continue;
      return pause();
    }
    if (connections_.size() >= limits_.connections) {
      refuse(socket, false);
      continue;
    }
    if (is_of_reserve(socket.fd()) && !raise_descriptor_limit() && !drop_oldest_stranger()) {
      refuse(socket, true);
      continue;
    }
    int fd = socket.fd(), on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    auto connection =
        std::make_unique<Connection>(std::move(socket), *this, after(limits_.handshake));
    epoll_event event{EPOLLIN, {.ptr = connection.get()}};
    if (epoll_ctl(epoll_.fd(), EPOLL_CTL_ADD, fd, &event)) continue;
    connection->place = strangers_.insert(strangers_.end(), connection.get());
    connections_[fd] = std::move(connection);
    ticking_ = true;
  }
}

// Stops listening for a while, rather than spin on the same event: newcomers wait in the kernel.
void Server::pause() {
  if (!accepting_) return;
  epoll_ctl(epoll_.fd(), EPOLL_CTL_DEL, listener_.fd(), nullptr);
  accepting_ = false;
  ticking_ = true;
}

void Server::resume() {
  if (!spare_) spare_ = make_spare();
  epoll_event knock{EPOLLIN, {.ptr = &listener_}};
  accepting_ = !epoll_ctl(epoll_.fd(), EPOLL_CTL_ADD, listener_.fd(), &knock);
  ticking_ = ticking_ || !accepting_;
}

// Strangers get a small part of the descriptors, however few there are.
bool Server::has_room_for_strangers() {
  const rlim_t part = std::max<rlim_t>(descriptor_limit() / 8, 16);
  return strangers_.size() < std::min<rlim_t>(limits_.strangers, part);
}

// False if there is none, or the oldest may still be about to prove itself.
bool Server::drop_oldest_stranger() {
  if (strangers_.empty()) return false;
  Connection& oldest = *strangers_.front();
  if (Clock::now() - oldest.arrival < std::chrono::duration<double>(limits_.courtesy)) return false;
  drop(oldest);
  return true;
}

// Called when there are no descriptors left. If there cannot be more, the newcomer is told. False
// if it has to wait.
bool Server::make_room() {
  if (errno != EMFILE && errno != ENFILE) return false;
  if (errno == EMFILE && raise_descriptor_limit()) return true;
  if (drop_oldest_stranger()) return true;
  if (!spare_) return false;
  spare_.close();
  Descriptor socket(accept4(listener_.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (socket) refuse(socket, true);
  const bool told = static_cast<bool>(socket);
  socket.close();
  spare_ = make_spare();
  return told;
}

void Server::refuse(const Descriptor& socket, bool for_want_of_descriptors) {
  std::string out;
  handshake::encode(out, handshake::full, uint8_t{for_want_of_descriptors},
                    uint64_t{connections_.size()});
  static_cast<void>(!send(socket.fd(), out.data(), out.size(), MSG_NOSIGNAL));
  // What is left unread when a socket is closed makes the other side lose what it was sent.
  static_cast<void>(!recv(socket.fd(), scratch_.data(), scratch_.size(), 0));
}

void Server::receive(Connection& connection) {
  ssize_t got = recv(connection.socket.fd(), scratch_.data(), scratch_.size(), 0);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got <= 0) return drop(connection);
  auto& in = connection.in;
  in.append(scratch_.data(), static_cast<size_t>(got));

  wire::Length length;
  size_t used = 0;
  while (!connection.dropped && wire::peek(std::string_view(in).substr(used), length)) {
    if (length > connection.frame_limit()) throw wire::Malformed();
    size_t end = used + sizeof length + length;
    if (in.size() < end) break;
    handle(connection, std::string_view(in).substr(used + sizeof length, length));
    flush_answered();
    used = end;
    if (connection.state == Connection::Ready && connection.out.empty())
      connection.deadline = never;
  }
  if (connection.dropped) return;
  if (used == in.size()) return reset(in);
  in.erase(0, used);
  if (connection.deadline == never) {
    connection.deadline = after(limits_.frame);
    ticking_ = true;
  }
}

void Server::handle(Connection& connection, std::string_view frame) {
  if (connection.state == Connection::Hello) return greet(connection, frame);
  if (connection.state == Connection::Proof) return verify(connection, frame);

  Request request = wire::decode_request(frame);
  if (request.op == Op::Cancel) {
    // It may cross the reply on the way; then there is nothing left to cancel.
    if (connection.busy && table_.withdraw(connection)) connection.answered();
    return;
  }
  if (connection.busy || !connection.out.empty()) throw wire::Malformed();
  if (posts(request.op)) {
    try {
      table_.attempt(request);
    } catch (const Failure&) {
      throw wire::Malformed();  // a client checks before it posts
    }
    return;
  }
  connection.busy = true;
  connection.request = std::move(request);
  connection.reply = {};
  table_.submit(connection);
}

void Server::greet(Connection& connection, std::string_view frame) {
  uint64_t magic;
  handshake::decode(frame, magic, connection.client_nonce);
  if (magic != handshake::magic) throw wire::Malformed();
  connection.server_nonce = handshake::nonce();
  handshake::encode(connection.out, magic, uint8_t{!secret_.empty()}, connection.server_nonce);
  connection.state = Connection::Proof;
  flush(connection);
}

void Server::verify(Connection& connection, std::string_view frame) {
  Digest theirs;
  handshake::decode(frame, theirs);
  auto expected = [&](handshake::Role role) {
    return handshake::proof(role, secret_, connection.client_nonce, connection.server_nonce);
  };
  bool welcome =
      secret_.empty() || equal_digests(view(theirs), view(expected(handshake::Role::Client)));
  Digest ours = welcome ? expected(handshake::Role::Server) : Digest{};
  handshake::encode(connection.out, uint8_t{welcome}, ours);
  connection.state = Connection::Ready;
  strangers_.erase(connection.place);
  flush(connection);
  if (!welcome) drop(connection);
}

// Replies made while a request was handled, by it or for those that it set free.
void Server::flush_answered() {
  for (size_t i = 0; i < answered_.size(); ++i) {
    Connection& connection = *answered_[i];
    if (connection.dropped) continue;
    try {
      wire::encode(connection.out, connection.reply);
      connection.reply = {};
      flush(connection);
    } catch (const std::bad_alloc&) {
      drop(connection);
    }
  }
  answered_.clear();
}

void Server::flush(Connection& connection) {
  auto& out = connection.out;
  while (connection.sent < out.size()) {
    ssize_t sent = send(connection.socket.fd(), out.data() + connection.sent,
                        out.size() - connection.sent, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno == EAGAIN) {
      if (connection.writable) return;
      if (connection.deadline == never) connection.deadline = after(limits_.frame);
      ticking_ = true;
      return watch(connection, true);
    }
    if (sent < 0) return drop(connection);
    connection.sent += static_cast<size_t>(sent);
  }
  reset(out);
  connection.sent = 0;
  if (connection.writable) {
    watch(connection, false);
    connection.deadline = never;
  }
}

void Server::watch(Connection& connection, bool writable) {
  epoll_event event{EPOLLIN | (writable ? EPOLLOUT : 0u), {.ptr = &connection}};
  epoll_ctl(epoll_.fd(), EPOLL_CTL_MOD, connection.socket.fd(), &event);
  connection.writable = writable;
}

void Server::drop(Connection& connection) {
  if (connection.dropped) return;
  connection.dropped = true;
  if (connection.state != Connection::Ready) strangers_.erase(connection.place);
  table_.withdraw(connection);
  auto found = connections_.find(connection.socket.fd());
  dropped_.push_back(std::move(found->second));
  connections_.erase(found);
  connection.socket.close();
}

// Drops those whose time is up, and listens again.
void Server::sweep() {
  auto now = Clock::now();
  ticking_ = false;
  std::vector<Connection*> late;
  for (auto& [fd, connection] : connections_) {
    if (connection->deadline <= now)
      late.push_back(connection.get());
    else if (connection->deadline != never)
      ticking_ = true;
  }
  for (auto* connection : late) drop(*connection);
  dropped_.clear();
  if (!accepting_) resume();
}

}  // namespace phalanx::store
