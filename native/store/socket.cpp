#include "store/socket.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>

namespace phalanx::store {
namespace {

[[noreturn]] void fail(const std::string& message) { throw Failure(Kind::Network, message); }

std::string reason(int error) { return std::strerror(error); }

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// IPv4 first on both sides, so that 'localhost' means the same to server and client.
std::vector<addrinfo> in_order(const Addresses& list) {
  std::vector<addrinfo> order;
  for (auto* entry = list.get(); entry; entry = entry->ai_next) order.push_back(*entry);
  std::ranges::stable_partition(order, [](auto& entry) { return entry.ai_family == AF_INET; });
  return order;
}

int resolve(const std::string& host, int port, Addresses& list) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  list.reset(error ? nullptr : found);
  return error;
}

template <class T>
void option(int fd, int level, int name, T value) {
  setsockopt(fd, level, name, &value, sizeof value);
}

// A connection to oneself is what TCP makes of a free local port; nobody listens there.
bool is_own_echo(int fd) {
  sockaddr_storage here{}, there{};
  socklen_t here_size = sizeof here, there_size = sizeof there;
  getsockname(fd, reinterpret_cast<sockaddr*>(&here), &here_size);
  getpeername(fd, reinterpret_cast<sockaddr*>(&there), &there_size);
  return here_size == there_size && !std::memcmp(&here, &there, here_size);
}

// One attempt. Returns the socket, or an empty one and errno.
Descriptor attempt(const addrinfo& address, const Patience& patience) {
  Descriptor socket(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return {};
  int error = ::connect(socket.fd(), address.ai_addr, address.ai_addrlen) ? errno : 0;
  while (error == EINPROGRESS) {
    auto left = std::chrono::ceil<std::chrono::milliseconds>(patience.look_up() - Clock::now());
    pollfd item{socket.fd(), POLLOUT, 0};
    int ready = poll(&item, 1, static_cast<int>(std::clamp<int64_t>(left.count(), 0, 60'000)));
    if (patience.check) patience.check();
    if (ready > 0) {
      socklen_t size = sizeof error;
      getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
    } else if (patience.exhausted()) {
      error = ETIMEDOUT;
    }
  }
  if (!error && is_own_echo(socket.fd())) error = ECONNREFUSED;
  if (error) {
    socket.close();
    errno = error;
    return {};
  }
  int fd = socket.fd();
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
  option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  // Blocked calls look up once per slice: one system call where polling would take two.
  constexpr auto slice = std::chrono::microseconds(Patience::slice);
  timeval tick{0, slice.count()};
  option(fd, SOL_SOCKET, SO_RCVTIMEO, tick);
  option(fd, SOL_SOCKET, SO_SNDTIMEO, tick);
  return socket;
}

}  // namespace

std::string endpoint(const std::string& host, int port) {
  bool v6 = host.find(':') != std::string::npos;
  return (v6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

Descriptor listen_on(const std::string& host, int port) {
  Addresses list(nullptr, freeaddrinfo);
  if (int error = resolve(host, port, list))
    fail("cannot listen on '" + host + "': " + gai_strerror(error) +
         "; give a name or an address of this machine");
  int error = 0;
  for (auto& address : in_order(list)) {
    Descriptor socket(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    option(socket.fd(), SOL_SOCKET, SO_REUSEADDR, 1);
    if (address.ai_family == AF_INET6) option(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, 1);
    if (!::bind(socket.fd(), address.ai_addr, address.ai_addrlen) &&
        !::listen(socket.fd(), SOMAXCONN))
      return socket;
    // Of several addresses the one that is ours but taken explains more than one that is not ours.
    if (error != EADDRINUSE) error = errno;
  }
  const char* next =
      error == EADDRINUSE ? "; another process has it: choose another port, or 0 for a free one"
      : error == EADDRNOTAVAIL ? "; it is not an address of this machine: the master must run there"
                               : "";
  fail("cannot listen on " + endpoint(host, port) + ": " + reason(error) + next);
}

Descriptor adopt_listener(int fd) {
  int listening = 0;
  socklen_t size = sizeof listening;
  if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) || !listening)
    throw Failure(Kind::Invalid,
                  "master_listen_fd=" + std::to_string(fd) +
                      " is not a listening socket; call bind() and listen() on it first");
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  return Descriptor(fd);
}

int port_of(const Descriptor& listener) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  getsockname(listener.fd(), reinterpret_cast<sockaddr*>(&address), &size);
  // The port is at the same place for both families.
  return ntohs(reinterpret_cast<sockaddr_in*>(&address)->sin_port);
}

Descriptor connect_to(const std::string& host, int port, const Patience& patience, bool retry) {
  Addresses list(nullptr, freeaddrinfo);
  auto start = Clock::now();
  int tries = 0;
  for (auto pause = 5ms;; pause = std::min(pause * 2, 200ms)) {
    ++tries;
    std::string why;
    int unresolved = resolve(host, port, list);
    if (unresolved && unresolved != EAI_AGAIN)
      fail("cannot resolve the store's host '" + host + "': " + gai_strerror(unresolved) +
           "; check the address of the master (MASTER_ADDR)");
    if (unresolved) why = gai_strerror(unresolved);
    for (auto& address : in_order(list)) {
      Descriptor socket = attempt(address, patience);
      if (socket) return socket;
      why = reason(errno);
    }
    if (!retry || Clock::now() + pause >= patience.deadline) {
      char spent[32];
      std::snprintf(spent, sizeof spent, "%.3g",
                    std::chrono::duration<double>(Clock::now() - start).count());
      fail("cannot connect to the store at " + endpoint(host, port) + ": " + why + " (" +
           std::to_string(tries) + (tries == 1 ? " try, " : " tries, ") + spent +
           " s); is the master (usually rank 0) running, and are its address and port right?");
    }
    std::this_thread::sleep_for(pause);
    if (patience.check) patience.check();
  }
}

}  // namespace phalanx::store
