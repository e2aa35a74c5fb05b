// A store's server, and what anybody may send to it: the first byte says whether as one that has
// been let in.
#include <sys/socket.h>

#include <cstdlib>

#include "store/client.hpp"
#include "store/server.hpp"

using namespace phalanx;
using namespace phalanx::store;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static auto& server = *new Server(listen_on("127.0.0.1", 0), "", {});
  if (size == 0) return 0;
  std::string bytes;
  if (data[0] % 4) {
    handshake::encode(bytes, handshake::magic, Digest{});
    handshake::encode(bytes, Digest{});
  }
  bytes.append(reinterpret_cast<const char*>(data) + 1, size - 1);
  const Patience patience(10);
  Descriptor socket = connect_to("127.0.0.1", server.port(), patience, false);
  // Less than a socket holds, so that this does not wait for room.
  static_cast<void>(!::send(socket.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL));
  ::shutdown(socket.fd(), SHUT_WR);
  char reply[4096];
  for (;;) {  // until the server hangs up: it has dealt with all of it
    ssize_t got = ::recv(socket.fd(), reply, sizeof reply, 0);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) break;
    if (patience.exhausted()) std::abort();
  }
  return 0;
}
