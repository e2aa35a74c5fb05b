// A store's client, and what may come from what it takes for a store: after a right handshake, or,
// as the first byte says, in place of one. The second byte chooses the request.
#include <sys/socket.h>

#include <cstdlib>
#include <thread>

#include "store/client.hpp"
#include "store/handshake.hpp"

using namespace phalanx;
using namespace phalanx::store;

namespace {

const Request kRequests[] = {{Op::Get, 0, {"a"}},           {Op::Get, 0, {"a", "b", "c"}},
                             {Op::Add, 1, {"count"}},       {Op::CompareSet, 0, {"a"}, {"x", "y"}},
                             {Op::Pop, 1, {"queue"}},       {Op::ListKeys},
                             {Op::Barrier, 2, {"meeting"}}, {Op::Set, 0, {"a"}, {"x"}}};

bool receive(const Descriptor& socket, void* into, size_t size) {
  return ::recv(socket.fd(), into, size, MSG_WAITALL) == ssize_t(size);
}

void send(const Descriptor& socket, const std::string& bytes) {
  static_cast<void>(!::send(socket.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL));
}

// Plays the server for one connection, and hangs up.
void play(const Descriptor& listener, bool shakes_hands, const std::string& bytes) {
  Descriptor socket;
  while (!socket) socket = Descriptor(::accept(listener.fd(), nullptr, nullptr));
  struct __attribute__((packed)) {
    wire::Length length;
    uint64_t magic;
    Digest nonce;
  } hello;
  struct __attribute__((packed)) {
    wire::Length length;
    Digest digest;
  } proof;
  std::string out;
  if (!receive(socket, &hello, sizeof hello)) return;
  if (shakes_hands) {
    handshake::encode(out, handshake::magic, uint8_t{0}, Digest{});
    send(socket, out);
    if (!receive(socket, &proof, sizeof proof)) return;
    out.clear();
    const Digest theirs = hello.nonce;
    handshake::encode(out, uint8_t{1},
                      handshake::proof(handshake::Role::Server, "", theirs, Digest{}));
  }
  send(socket, out + bytes);
  ::shutdown(socket.fd(), SHUT_WR);
  char rest[4096];
  while (::recv(socket.fd(), rest, sizeof rest, 0) > 0) continue;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static auto& listener = *new Descriptor(listen_on("127.0.0.1", 0));
  if (size < 2) return 0;
  const bool shakes_hands = data[0] % 8;
  const Request& request = kRequests[data[1] % std::size(kRequests)];
  const std::string bytes(reinterpret_cast<const char*>(data) + 2, size - 2);
  std::thread server(play, std::cref(listener), shakes_hands, bytes);
  try {
    // One try: who hangs up is not asked again.
    Client client("127.0.0.1", port_of(listener), "", Patience(0));
    const Reply reply = client.run(request, Patience(5));
    if (request.op == Op::Get && reply.values.size() != request.keys.size()) std::abort();
    if (request.op == Op::Pop && reply.values.size() != 1) std::abort();
  } catch (const Failure&) {
  }
  server.join();
  return 0;
}
