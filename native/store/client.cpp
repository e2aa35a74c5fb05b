#include "store/client.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "store/handshake.hpp"

namespace phalanx::store {
namespace {

constexpr size_t max_idle = 64;
constexpr size_t min_buffer = 1024;
constexpr size_t max_buffer = size_t{64} << 10;  // kept by an idle connection
// What a server gets to take back a request whose time is up, or to answer a newcomer.
constexpr double grace = 10;
// A port that accepts and hangs up this often is not a store that is just starting.
constexpr int max_hangups = 8;

struct HungUp {};  // the peer closed the connection
struct Full {
  uint8_t for_want_of_descriptors;
  uint64_t connections;
};

// That a reply has, unless it lists keys.
size_t num_values(const Request& request) {
  switch (request.op) {
    case Op::Get:
      return request.keys.size();
    case Op::CompareSet:
    case Op::Pop:
      return 1;
    default:
      return 0;
  }
}

}  // namespace

Client::Client(std::string host, int port, std::string secret, const Patience& patience)
    : host_(std::move(host)),
      port_(port),
      secret_(std::move(secret)),
      where_(" (store at " + endpoint(host_, port_) + ")") {
  give_back(connect(patience, true));
}

void Client::lost(const std::string& why) const {
  throw Failure(Kind::Network,
                "lost the store at " + endpoint(host_, port_) + ": " + why +
                    "; its process (usually rank 0) has probably ended: look at its output first");
}

std::unique_lock<std::timed_mutex> Client::lock(Connections& all, const Patience& patience) {
  std::unique_lock lock(all.mutex, std::try_to_lock);
  if (!lock && !lock.try_lock_until(std::max(patience.deadline, Clock::now() + 1s)))
    lost("it takes no more requests");
  return lock;
}

// With the lock held. None if all are in use.
Client::Lease Client::take_idle(Connections& all) {
  if (all.idle.empty()) return nullptr;
  Lease connection = std::move(all.idle.back());
  all.idle.pop_back();
  return connection;
}

void Client::give_back(Lease connection) {
  if (connection->in.capacity() > max_buffer) connection->in = {};
  Connections& all = connections_.here();
  std::lock_guard lock(all.mutex);
  if (all.idle.size() < max_idle) all.idle.push_back(std::move(connection));
}

void Client::post(const std::string& bytes, const Patience& patience) {
  Connections& all = connections_.here();
  auto held = lock(all, patience);
  Lease connection = std::move(all.posted);
  if (!connection) {
    connection = take_idle(all);
    if (!connection) connection = connect(Patience(grace, patience.check), false);
    // Nothing comes back from a post, so the first one to a server that has gone would be lost
    // unnoticed; further ones are told by the socket.
    char byte;
    if (recv(connection->socket.fd(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0) throw HungUp();
  }
  send(*connection, bytes, patience);
  all.posted = std::move(connection);
}

// Sends a request, and returns the connection to read the reply from.
Client::Lease Client::ask(const std::string& bytes, const Patience& patience) {
  Lease connection;
  {
    Connections& all = connections_.here();
    auto held = lock(all, patience);
    if (all.posted) {
      // Until the server has seen what was posted, no other thread may ask it anything on another
      // connection. It says so by answering a question, sent ahead of the one that may take long.
      connection = std::move(all.posted);
      std::string both;
      wire::encode(both, Request{Op::Check});
      both += bytes;
      send(*connection, both, patience);
      std::string_view frame;
      if (!receive(*connection, Patience(grace, patience.check), frame)) lost("it does not answer");
      return connection;
    }
    connection = take_idle(all);
  }
  // The server was there before, so it is not waited for.
  if (!connection) connection = connect(Patience(grace, patience.check), false);
  send(*connection, bytes, patience);
  return connection;
}

Client::Lease Client::connect(const Patience& patience, bool retry) const {
  for (int hangups = 1;; ++hangups) {
    auto connection = std::make_unique<Connection>();
    connection->socket = connect_to(host_, port_, patience, retry);
    try {
      if (introduce(*connection, Patience(grace, patience.check))) return connection;
      throw Failure(Kind::Network, "whatever listens on " + endpoint(host_, port_) +
                                       " did not answer the handshake; is it a phalanx store?");
    } catch (const HungUp&) {
      // A server that is flooded by strangers may have taken this one for another.
      if (hangups == max_hangups || patience.exhausted())
        throw Failure(Kind::Network, "whatever listens on " + endpoint(host_, port_) +
                                         " hangs up during the handshake; is it a phalanx store?");
    } catch (const Full& full) {
      // Those that are just ending make room.
      if (hangups == max_hangups || !retry || patience.exhausted())
        throw Failure(Kind::Network,
                      "the store at " + endpoint(host_, port_) + " takes no more clients: it has " +
                          std::to_string(full.connections) + " connections, and " +
                          (full.for_want_of_descriptors
                               ? "its process (usually rank 0) has no descriptors left: raise the "
                                 "hard limit there ('ulimit -Hn')"
                               : "that is its limit"));
    } catch (const wire::Malformed&) {
      throw Failure(Kind::Network, "what listens on " + endpoint(host_, port_) +
                                       " is not a phalanx store, or one of another version");
    }
    std::this_thread::sleep_for(20ms * hangups);
  }
}

// The client's side of handshake.hpp. False if the server did not answer in time.
bool Client::introduce(Connection& connection, const Patience& patience) const {
  auto refuse = [&](const std::string& why) {
    throw Failure(Kind::Network, "store at " + endpoint(host_, port_) + ": " + why);
  };
  std::string_view frame;
  Digest mine = handshake::nonce(), theirs;
  std::string bytes;
  handshake::encode(bytes, handshake::magic, mine);
  send(connection, bytes, patience);

  uint64_t magic;
  uint8_t secured, welcome;
  if (!receive(connection, patience, frame)) return false;
  if (frame.size() == handshake::full_size) {
    Full full{};
    handshake::decode(frame, magic, full.for_want_of_descriptors, full.connections);
    if (magic == handshake::full) throw full;
  }
  handshake::decode(frame, magic, secured, theirs);
  if (magic != handshake::magic) throw wire::Malformed();
  if (secured && secret_.empty())
    refuse(
        "it asks for the job's secret, and this process has none; set PHALANX_SECRET to the same "
        "value everywhere");
  if (!secured && !secret_.empty())
    refuse(
        "it has no secret, but this process does (PHALANX_SECRET), so it is not trusted; set the "
        "same value everywhere");

  bytes.clear();
  handshake::encode(bytes, handshake::proof(handshake::Role::Client, secret_, mine, theirs));
  send(connection, bytes, patience);
  if (!receive(connection, patience, frame)) return false;
  Digest proof;
  handshake::decode(frame, welcome, proof);
  if (!welcome)
    refuse(
        "secrets differ: PHALANX_SECRET of this process is not the server's; set the same value "
        "everywhere");
  if (!equal_digests(view(proof),
                     view(handshake::proof(handshake::Role::Server, secret_, mine, theirs))))
    refuse("it cannot prove that it knows the job's secret (PHALANX_SECRET), so it is not trusted");
  return true;
}

void Client::send(Connection& connection, std::string_view bytes, const Patience& patience) const {
  while (!bytes.empty()) {
    ssize_t sent = ::send(connection.socket.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent > 0) {
      bytes.remove_prefix(static_cast<size_t>(sent));
      continue;
    }
    if (errno == ECONNRESET || errno == EPIPE) throw HungUp();
    if (errno != EAGAIN && errno != EINTR) lost(std::strerror(errno));
    if (patience.check) patience.check();
    if (patience.exhausted()) lost("it takes no more requests");
  }
}

bool Client::receive(Connection& connection, const Patience& patience,
                     std::string_view& frame) const {
  auto& [socket, in, filled, used] = connection;
  filled -= used;
  std::memmove(in.data(), in.data() + used, filled);
  used = 0;
  if (in.size() < min_buffer) in.resize(min_buffer);
  for (wire::Length length;;) {
    if (wire::peek({in.data(), filled}, length)) {
      if (length > wire::max_frame) throw wire::Malformed();
      const size_t total = sizeof length + length;
      if (filled >= total) {
        used = total;
        frame = std::string_view(in).substr(sizeof length, length);
        return true;
      }
      if (in.size() < total) in.resize(total);
    }
    // The socket's own timeout is a slice; the rest of the patience may be shorter than that.
    auto left = patience.deadline - Clock::now();
    if (left < Patience::slice) {
      auto ms = std::chrono::ceil<std::chrono::milliseconds>(std::max<Clock::duration>(left, 0s));
      pollfd item{socket.fd(), POLLIN, 0};
      if (poll(&item, 1, static_cast<int>(ms.count())) <= 0 && patience.exhausted()) return false;
    }
    ssize_t got = recv(socket.fd(), in.data() + filled, in.size() - filled, 0);
    if (got == 0 || (got < 0 && errno == ECONNRESET)) throw HungUp();
    if (got > 0) {
      filled += static_cast<size_t>(got);
      continue;
    }
    if (errno != EAGAIN && errno != EINTR) lost(std::strerror(errno));
    if (patience.check) patience.check();
    if (patience.exhausted()) return false;
  }
}

Reply Client::run(Request request, const Patience& patience) {
  validate(request);
  wire::check_size(request);
  std::string bytes;
  wire::encode(bytes, request);
  try {
    if (posts(request.op)) {
      post(bytes, patience);
      return {};
    }
    Lease connection = ask(bytes, patience);
    std::string_view frame;
    if (!receive(*connection, patience, frame)) {
      // The server answers in any case: with what was asked for, if it came just now, or that it
      // gave up. So nothing is popped from a queue without reaching somebody, and the connection
      // stays in step.
      bytes.clear();
      wire::encode(bytes, Request{Op::Cancel});
      Patience last(grace, patience.check);
      send(*connection, bytes, last);
      if (!receive(*connection, last, frame)) lost("it does not answer");
    }
    Reply reply = wire::decode_reply(frame);
    if (reply.status == Status::Ok && reply.values.size() != num_values(request) &&
        request.op != Op::ListKeys)
      throw wire::Malformed();
    give_back(std::move(connection));
    return accepted(std::move(reply), request, patience, where_);
  } catch (const HungUp&) {
    lost("connection closed");
  } catch (const wire::Malformed&) {
    lost("it sent something that is not a reply");
  }
}

}  // namespace phalanx::store
