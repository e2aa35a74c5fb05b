#include "store/store.hpp"

#include <cstdio>

namespace phalanx::store {
namespace {

const char* name(const Request& request) {
  switch (request.op) {
    case Op::Get:
      return request.keys.size() == 1 ? "get" : "multi_get";
    case Op::Wait:
      return "wait";
    case Op::Pop:
      return "queue_pop";
    case Op::Barrier:
      return "barrier";
    default:
      return "request";
  }
}

// The shape each request must have; a peer may send anything.
struct Shape {
  size_t min_keys, max_keys;
  size_t values;
};

constexpr size_t any = SIZE_MAX;

Shape shape(const Request& request) {
  switch (request.op) {
    case Op::Set:
      return {0, any, request.keys.size()};
    case Op::Get:
    case Op::Check:
    case Op::Wait:
      return {0, any, 0};
    case Op::Add:
    case Op::Delete:
    case Op::Pop:
    case Op::Length:
      return {1, 1, 0};
    case Op::Append:
    case Op::Push:
      return {1, 1, 1};
    case Op::CompareSet:
      return {1, 1, 2};
    case Op::Barrier:
      return {1, 1, std::min<size_t>(request.values.size(), 1)};
    case Op::NumKeys:
    case Op::ListKeys:
      return {0, 0, 0};
    default:
      throw Failure(Kind::Invalid, "unknown request");
  }
}

}  // namespace

void validate(const Request& request) {
  auto [min_keys, max_keys, values] = shape(request);
  size_t keys = request.keys.size();
  if (request.op == Op::Set && request.values.size() != keys)
    throw Failure(Kind::Invalid, "multi_set: " + std::to_string(keys) + " keys but " +
                                     std::to_string(request.values.size()) +
                                     " values; give one value for each key");
  if (keys < min_keys || keys > max_keys || request.values.size() != values)
    throw Failure(Kind::Invalid, "malformed request");
  if (request.op == Op::Barrier && request.number < 1)
    throw Failure(Kind::Invalid,
                  "barrier: world_size must be at least 1, not " + std::to_string(request.number));
}

std::string quoted(const std::vector<std::string>& keys) {
  constexpr size_t shown = 8;
  std::string text;
  for (size_t i = 0; i < std::min(keys.size(), shown); ++i)
    text += (i ? ", '" : "'") + keys[i] + "'";
  if (keys.size() > shown) text += " and " + std::to_string(keys.size() - shown) + " more";
  return text;
}

Reply accepted(Reply reply, const Request& request, const Patience& patience,
               const std::string& where) {
  switch (reply.status) {
    case Status::Ok:
      return reply;
    case Status::QueueEmpty:
      throw Failure(Kind::QueueEmpty,
                    "queue_pop: queue " + quoted(request.keys) + " is empty" + where);
    case Status::Cancelled: {
      char seconds[32];
      std::snprintf(seconds, sizeof seconds, "%.6g", patience.seconds);
      const char* what = request.op == Op::Pop       ? ": nothing was pushed to queue "
                         : request.op == Op::Barrier ? ": too few came to "
                         : reply.values.size() == 1  ? ": nobody set key "
                                                     : ": nobody set keys ";
      throw Failure(Kind::StoreTimeout,
                    name(request) + (what + quoted(reply.values)) + " within " + seconds + " s" +
                        where + "; look at the process that should have, or raise the timeout");
    }
    default:
      throw Failure(Kind::Invalid,
                    reply.values.empty() ? "request refused" + where : reply.values[0]);
  }
}

}  // namespace phalanx::store
