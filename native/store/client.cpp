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
constexpr size_t max_buffer = size_t{64} << 10;  // kept by an idle connection
// What a server gets to take back a request whose time is up, or to answer a newcomer.
constexpr double grace = 10;
// A port that accepts and hangs up this often is not a store that is just starting.
constexpr int max_hangups = 5;

struct HungUp {};  // the peer closed the connection

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

Client::Lease Client::take(const Patience& patience) {
  {
    std::lock_guard lock(mutex_);
    while (!idle_.empty()) {
      Lease connection = std::move(idle_.back());
      idle_.pop_back();
      if (connection->socket.ours())
        return connection;  // else inherited through fork(): not to be shared
    }
  }
  // The server was there before, so it is not waited for.
  return connect(Patience(grace, patience.check), false);
}

void Client::give_back(Lease connection) {
  std::lock_guard lock(mutex_);
  if (idle_.size() < max_idle) idle_.push_back(std::move(connection));
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
      if (hangups == max_hangups || !retry || patience.exhausted())
        throw Failure(Kind::Network, "whatever listens on " + endpoint(host_, port_) +
                                         " hangs up during the handshake; is it a phalanx store?");
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
  handshake::encode(connection.buffer, handshake::magic, mine);
  send(connection, patience);

  uint64_t magic;
  uint8_t secured, welcome;
  if (!receive(connection, patience, frame)) return false;
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

  connection.buffer.clear();
  handshake::encode(connection.buffer,
                    handshake::proof(handshake::Role::Client, secret_, mine, theirs));
  send(connection, patience);
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

void Client::send(Connection& connection, const Patience& patience) const {
  std::string_view rest = connection.buffer;
  while (!rest.empty()) {
    ssize_t sent = ::send(connection.socket.fd(), rest.data(), rest.size(), MSG_NOSIGNAL);
    if (sent > 0) {
      rest.remove_prefix(static_cast<size_t>(sent));
      continue;
    }
    if (errno == ECONNRESET || errno == EPIPE) throw HungUp();
    if (errno != EAGAIN && errno != EINTR) lost(std::strerror(errno));
    if (patience.check) patience.check();
    if (patience.exhausted()) lost("it takes no more requests");
  }
  connection.buffer.clear();
}

bool Client::receive(Connection& connection, const Patience& patience,
                     std::string_view& frame) const {
  auto& buffer = connection.buffer;
  size_t filled = 0;
  wire::Length length = 0;
  buffer.resize(std::max<size_t>(buffer.capacity(), 4096));
  for (;;) {
    // The socket's own timeout is a slice; the rest of the patience may be shorter than that.
    auto left = patience.deadline - Clock::now();
    if (left < Patience::slice) {
      auto ms =
          std::chrono::ceil<std::chrono::milliseconds>(std::max<Clock::duration>(left, 0s)).count();
      pollfd item{connection.socket.fd(), POLLIN, 0};
      if (poll(&item, 1, static_cast<int>(ms)) <= 0 && patience.exhausted()) return false;
    }
    ssize_t got = recv(connection.socket.fd(), buffer.data() + filled, buffer.size() - filled, 0);
    if (got == 0 || (got < 0 && errno == ECONNRESET)) throw HungUp();
    if (got < 0) {
      if (errno != EAGAIN && errno != EINTR) lost(std::strerror(errno));
      if (patience.check) patience.check();
      if (patience.exhausted()) return false;
      continue;
    }
    filled += static_cast<size_t>(got);
    if (!wire::peek({buffer.data(), filled}, length)) continue;
    if (length > wire::max_frame) throw wire::Malformed();
    size_t total = sizeof length + length;
    if (filled > total) throw wire::Malformed();  // replies come one by one
    if (filled == total) break;
    if (buffer.size() < total) buffer.resize(total);
  }
  frame = std::string_view(buffer).substr(sizeof length, length);
  return true;
}

Reply Client::run(Request request, const Patience& patience) {
  Lease connection = take(patience);
  auto& buffer = connection->buffer;
  buffer.clear();
  wire::encode(buffer, request);
  wire::check_size(buffer.size());
  try {
    std::string_view frame;
    send(*connection, patience);
    if (!receive(*connection, patience, frame)) {
      // The server answers in any case: with what was asked for, if it came just now, or that it
      // gave up. So nothing is popped from a queue without reaching somebody, and the connection
      // stays in step.
      buffer.clear();
      wire::encode(buffer, Request{Op::Cancel});
      Patience last(grace, patience.check);
      send(*connection, last);
      if (!receive(*connection, last, frame)) lost("it does not answer");
    }
    Reply reply = wire::decode_reply(frame);
    if (buffer.capacity() > max_buffer) std::string().swap(buffer);
    give_back(std::move(connection));
    return accepted(std::move(reply), request, patience, where_);
  } catch (const HungUp&) {
    lost("connection closed");
  } catch (const wire::Malformed&) {
    lost("it sent something that is not a reply");
  }
}

}  // namespace phalanx::store
