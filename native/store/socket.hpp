// Making connections.
#pragma once

#include <string>

#include "store/descriptor.hpp"
#include "store/store.hpp"

namespace phalanx::store {

// Listens on exactly this address; port 0 picks a free one.
Descriptor listen_on(const std::string& host, int port);
// Takes over a descriptor that already listens.
Descriptor adopt_listener(int fd);
int port_of(const Descriptor& listener);

// Connects, and keeps trying until the patience ends if nobody listens there yet (`retry`).
Descriptor connect_to(const std::string& host, int port, const Patience& patience, bool retry);

std::string endpoint(const std::string& host, int port);

}  // namespace phalanx::store
