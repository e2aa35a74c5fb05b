// How requests and replies look in a socket and in a file: a frame is a length and that many bytes.
// Numbers are in the machine's byte order; the handshake refuses a peer of the other one.
#pragma once

#include <cstring>
#include <string_view>

#include "store/store.hpp"

namespace phalanx::store::wire {

using Length = uint32_t;
constexpr size_t max_frame = size_t{64} << 20;

struct Malformed {};  // thrown by the decoders: the bytes are not what they should be

class Writer {
 public:
  // Opens a frame at the end of `out`; finish() writes its length.
  explicit Writer(std::string& out) : out_(out), start_(out.size()) { number(Length{0}); }

  template <class T>
  void number(T value) {
    out_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void strings(const std::vector<std::string>& list) {
    number(static_cast<Length>(list.size()));
    for (auto& text : list) {
      number(static_cast<Length>(text.size()));
      out_ += text;
    }
  }
  void finish() {
    auto length = static_cast<Length>(out_.size() - start_ - sizeof(Length));
    std::memcpy(out_.data() + start_, &length, sizeof length);
  }

 private:
  std::string& out_;
  size_t start_;
};

class Reader {
 public:
  explicit Reader(std::string_view frame) : rest_(frame) {}

  std::string_view bytes(size_t count) {
    if (count > rest_.size()) throw Malformed();
    auto taken = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return taken;
  }
  template <class T>
  T number() {
    T value;
    std::memcpy(&value, bytes(sizeof value).data(), sizeof value);
    return value;
  }
  std::vector<std::string> strings() {
    auto count = number<Length>();
    // Each costs at least its length: no more memory is reserved than was sent.
    if (count > rest_.size() / sizeof(Length)) throw Malformed();
    std::vector<std::string> list;
    list.reserve(count);
    for (Length i = 0; i < count; ++i) list.emplace_back(bytes(number<Length>()));
    return list;
  }
  void finish() const {
    if (!rest_.empty()) throw Malformed();
  }

 private:
  std::string_view rest_;
};

// The length of the first frame's contents, or none if `bytes` does not hold even the length.
inline bool peek(std::string_view bytes, Length& length) {
  if (bytes.size() < sizeof length) return false;
  std::memcpy(&length, bytes.data(), sizeof length);
  return true;
}

// The bytes that a string takes, and at most those that a request or reply takes beside strings.
inline size_t size(const std::string& text) { return sizeof(Length) + text.size(); }
constexpr size_t overhead = 32;

inline size_t size(const Request& request) {
  size_t total = overhead;
  for (auto& key : request.keys) total += size(key);
  for (auto& value : request.values) total += size(value);
  return total;
}

inline void encode(std::string& out, const Request& request) {
  out.reserve(out.size() + size(request));
  Writer writer(out);
  writer.number(request.op);
  writer.number(request.number);
  writer.strings(request.keys);
  writer.strings(request.values);
  writer.finish();
}

inline void encode(std::string& out, const Reply& reply) {
  Writer writer(out);
  writer.number(reply.status);
  writer.number(reply.number);
  writer.strings(reply.values);
  writer.finish();
}

inline Request decode_request(std::string_view frame) {
  Reader reader(frame);
  Request request{reader.number<Op>()};
  if (request.op >= Op::Count) throw Malformed();
  request.number = reader.number<int64_t>();
  request.keys = reader.strings();
  request.values = reader.strings();
  reader.finish();
  return request;
}

inline Reply decode_reply(std::string_view frame) {
  Reader reader(frame);
  Reply reply{reader.number<Status>()};
  if (reply.status >= Status::Count) throw Malformed();
  reply.number = reader.number<int64_t>();
  reply.values = reader.strings();
  reader.finish();
  return reply;
}

// Throws before a frame is made that no server would take.
inline void check_size(const Request& request) {
  if (size(request) > max_frame)
    throw Failure(Kind::Invalid,
                  "a request of " + std::to_string(size(request)) + " bytes is more than the " +
                      std::to_string(max_frame) +
                      " that a store takes at once; send large data with a collective");
}

}  // namespace phalanx::store::wire
