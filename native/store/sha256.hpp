// SHA-256 (FIPS 180-4) and HMAC (RFC 2104), for the handshake of the TCP store.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace phalanx {

using Digest = std::array<uint8_t, 32>;

Digest sha256(std::string_view message);
Digest hmac_sha256(std::string_view key, std::string_view message);

// Compares in a time that does not depend on where the two differ.
bool equal_digests(std::string_view a, std::string_view b);

inline std::string_view view(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

}  // namespace phalanx
