#include "store/store.hpp"

#include <cstdio>

namespace phalanx::store {
namespace {

const char* name(const Request& request) {
  switch (request.op) {
    case Op::Get: return request.keys.size() == 1 ? "get" : "multi_get";
    case Op::Wait: return "wait";
    case Op::Pop: return "queue_pop";
    case Op::Barrier: return "barrier";
    default: return "request";
  }
}

}  // namespace

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
    case Status::Ok: return reply;
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
