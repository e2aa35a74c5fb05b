// The first four frames of a connection: who speaks, and that both know the secret of the job.
//
//   client  hello      magic, client nonce
//   server  challenge  magic, whether it has a secret, server nonce
//   client  proof      HMAC(secret, "client" + nonces)
//   server  verdict    whether the proof is right, and if so HMAC(secret, "server" + nonces)
//
// The roles differ in what they sign, so neither side's proof can be played back as the other's;
// fresh nonces make old proofs worthless. It proves identity; it does not hide what is sent
// afterwards.
//
// A server that takes nobody else in says so in place of the challenge: full, whether it is for
// want of descriptors, and how many are connected.
#pragma once

#include <sys/random.h>

#include "store/sha256.hpp"
#include "store/wire.hpp"

namespace phalanx::store::handshake {

// Read as a number: a peer of the other byte order, or another protocol, does not match.
constexpr uint64_t magic = 0x7068616c616e7801;  // "phalanx", version 1
constexpr uint64_t full = 0x70686c7866756c6c;   // "phlxfull"
constexpr size_t full_size = sizeof(uint64_t) + sizeof(uint8_t) + sizeof(uint64_t);
constexpr size_t max_frame = 64;

enum class Role : uint8_t { Client, Server };

inline Digest nonce() {
  Digest bytes;
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    throw Failure(Kind::Network, "the system has no random numbers for the store's handshake");
  return bytes;
}

inline Digest proof(Role role, const std::string& secret, const Digest& client,
                    const Digest& server) {
  std::string message = role == Role::Client ? "phalanx store client" : "phalanx store server";
  message.append(view(client)).append(view(server));
  return hmac_sha256(secret, message);
}

template <class... Parts>
void encode(std::string& out, const Parts&... parts) {
  wire::Writer writer(out);
  (writer.number(parts), ...);
  writer.finish();
}

template <class... Parts>
void decode(std::string_view frame, Parts&... parts) {
  wire::Reader reader(frame);
  ((parts = reader.number<Parts>()), ...);
  reader.finish();
}

}  // namespace phalanx::store::handshake
