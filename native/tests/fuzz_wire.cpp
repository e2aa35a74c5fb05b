// Bytes as requests and replies. What can be read is written as it was; what a table is asked for
// leaves it in order, whatever the requests before.
#include <cstdlib>
#include <string_view>

#include "store/table.hpp"
#include "store/wire.hpp"

using namespace phalanx;
using namespace phalanx::store;

namespace {

template <class Decode>
void check_round_trip(std::string_view frame, Decode decode) {
  try {
    std::string bytes;
    wire::encode(bytes, decode(frame));
    if (std::string_view(bytes).substr(sizeof(wire::Length)) != frame) std::abort();
  } catch (const wire::Malformed&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  check_round_trip(rest, wire::decode_request);
  check_round_trip(rest, wire::decode_reply);
  Table table;
  wire::Length length;
  while (wire::peek(rest, length) && rest.size() - sizeof length >= length) {
    try {
      Request request = wire::decode_request(rest.substr(sizeof length, length));
      if (auto reply = table.attempt(request)) {
        std::string bytes;
        wire::encode(bytes, *reply);
      } else {
        table.cancelled(request);
      }
    } catch (const wire::Malformed&) {
    } catch (const Failure&) {
    }
    rest.remove_prefix(sizeof length + length);
  }
  // It still works.
  Request set{Op::Set, 0, {"a key"}, {"a value"}};
  table.attempt(set);
  Request get{Op::Get, 0, {"a key"}};
  if (table.attempt(get)->values.at(0) != "a value") std::abort();
  return 0;
}
