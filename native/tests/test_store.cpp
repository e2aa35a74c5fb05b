// The stores: one table behind memory, files and sockets, and what a peer may send to it.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <climits>
#include <cstdlib>
#include <optional>
#include <thread>

#include "check.hpp"
#include "store/client.hpp"
#include "store/file.hpp"
#include "store/heart.hpp"
#include "store/server.hpp"
#include "store/wire.hpp"

using namespace phalanx;
using namespace phalanx::store;

namespace {

const Patience kPatience(20);

std::optional<phalanx::Kind> failure_of(Store& store, Request request, double seconds = 20) {
  try {
    store.run(std::move(request), Patience(seconds));
  } catch (const Failure& failure) {
    return failure.kind;
  }
  return {};
}

std::string answer(Store& store, Request request) {
  return store.run(std::move(request), kPatience).values.at(0);
}

std::string get(Store& store, const std::string& key) { return answer(store, {Op::Get, 0, {key}}); }

// A file's name that is gone when the test is.
struct Path {
  std::string text = "/tmp/phalanx-store-XXXXXX";
  Path() { ::close(::mkstemp(text.data())); }
  ~Path() { ::unlink(text.c_str()); }
};

struct Served {
  Server server;
  explicit Served(const std::string& secret = "")
      : server(listen_on("127.0.0.1", 0), secret, Server::Limits()) {}
  std::unique_ptr<Client> client(const std::string& secret = "") const {
    return std::make_unique<Client>("127.0.0.1", server.port(), secret, kPatience);
  }
};

// What every store must do, by two that are one.
void check_contract(Store& one, Store& other) {
  one.run({Op::Set, 0, {"a", "b"}, {"first", std::string("\0second", 7)}}, kPatience);
  CHECK_EQ(get(other, "a"), "first");
  CHECK_EQ(get(other, "b").size(), 7u);
  CHECK_EQ(one.run({Op::Add, 5, {"count"}}, kPatience).number, 5);
  CHECK_EQ(other.run({Op::Add, -7, {"count"}}, kPatience).number, -2);
  CHECK_EQ(one.run({Op::Check, 0, {"a", "count"}}, kPatience).number, 1);
  CHECK_EQ(one.run({Op::Check, 0, {"a", "nothing"}}, kPatience).number, 0);
  CHECK_EQ(answer(other, {Op::CompareSet, 0, {"a"}, {"wrong", "x"}}), "first");
  CHECK_EQ(answer(other, {Op::CompareSet, 0, {"a"}, {"first", "x"}}), "x");
  one.run({Op::Append, 0, {"a"}, {"yz"}}, kPatience);
  CHECK_EQ(get(other, "a"), "xyz");
  one.run({Op::Push, 0, {"queue"}, {"1"}}, kPatience);
  one.run({Op::Push, 0, {"queue"}, {"2"}}, kPatience);
  CHECK_EQ(other.run({Op::Length, 0, {"queue"}}, kPatience).number, 2);
  CHECK_EQ(answer(other, {Op::Pop, 0, {"queue"}}), "1");
  CHECK_EQ(answer(one, {Op::Pop, 1, {"queue"}}), "2");
  CHECK(failure_of(one, {Op::Pop, 0, {"queue"}}) == phalanx::Kind::QueueEmpty);
  CHECK(failure_of(one, {Op::Get, 0, {"nothing"}}, 0.02) == phalanx::Kind::StoreTimeout);
  CHECK_EQ(one.run({Op::Delete, 0, {"b"}}, kPatience).number, 1);
  CHECK_EQ(other.run({Op::Delete, 0, {"b"}}, kPatience).number, 0);
  CHECK_EQ(other.run({Op::NumKeys}, kPatience).number, 2);
  CHECK_EQ(one.run({Op::ListKeys}, kPatience).values.size(), 2u);
  // A wait ends when another one sets the key, and a barrier when all have come.
  std::thread late([&] {
    other.run({Op::Set, 0, {"late"}, {"here"}}, kPatience);
    other.run({Op::Barrier, 2, {"meeting"}}, kPatience);
  });
  CHECK_EQ(get(one, "late"), "here");
  one.run({Op::Barrier, 2, {"meeting"}}, kPatience);
  late.join();
  // What makes no sense is refused, and changes nothing.
  CHECK(failure_of(one, {Op::Add, 1, {"a"}}) == phalanx::Kind::Invalid);
  one.run({Op::Set, 0, {"most"}, {std::to_string(INT64_MAX)}}, kPatience);
  CHECK(failure_of(one, {Op::Add, 1, {"most"}}) == phalanx::Kind::Invalid);
  CHECK_EQ(get(one, "most"), std::to_string(INT64_MAX));
  one.run({Op::Set, 0, {"full/arrived"}, {std::to_string(INT64_MAX)}}, kPatience);
  CHECK(failure_of(one, {Op::Barrier, 2, {"full"}}) == phalanx::Kind::Invalid);
  CHECK(failure_of(one, {Op::Barrier, 0, {"meeting"}}) == phalanx::Kind::Invalid);
  CHECK(failure_of(one, {Op::Set, 0, {"a"}, {}}) == phalanx::Kind::Invalid);
  CHECK(failure_of(one, {Op::Join}) == phalanx::Kind::Invalid);
  CHECK(failure_of(one, {Op::Get, 0, {"a"}, {"a value"}}) == phalanx::Kind::Invalid);
}

// A peer that sends what it likes, after the handshake of a server without a secret.
struct Stranger {
  Descriptor socket;
  explicit Stranger(int port) : socket(connect_to("127.0.0.1", port, kPatience, false)) {}
  void send(const std::string& bytes) {
    CHECK_EQ(::send(socket.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL), ssize_t(bytes.size()));
  }
  // All that comes until the peer hangs up.
  std::string rest() {
    std::string all(4096, '\0');
    size_t filled = 0;
    for (;;) {
      ssize_t got = ::recv(socket.fd(), all.data() + filled, all.size() - filled, 0);
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      if (got <= 0) return all.substr(0, filled);
      filled += size_t(got);
    }
  }
  void shake_hands() {
    std::string bytes;
    handshake::encode(bytes, handshake::magic, Digest{});
    handshake::encode(bytes, Digest{});
    send(bytes);
  }
};

std::string frame(const std::string& contents) {
  auto length = wire::Length(contents.size());
  return std::string(reinterpret_cast<char*>(&length), sizeof length) + contents;
}

}  // namespace

TEST(a_table_keeps_the_contract) {
  Table table;
  check_contract(table, table);
}

TEST(a_file_keeps_the_contract) {
  Path path;
  File one(path.text, 2), other(path.text, 2);
  check_contract(one, other);
}

TEST(a_server_keeps_the_contract) {
  for (std::string secret : {"", "of the job"}) {
    Served served(secret);
    auto one = served.client(secret), other = served.client(secret);
    check_contract(*one, *other);
  }
}

TEST(who_does_not_know_the_secret_is_not_let_in) {
  Served served("of the job");
  for (std::string secret : {"", "another"}) CHECK_THROWS(served.client(secret), Failure);
  Served open;
  CHECK_THROWS(open.client("of the job"), Failure);
}

TEST(the_last_user_removes_a_file) {
  Path path;
  {
    File one(path.text, 2);
    File other(path.text, 2);
    one.run({Op::Set, 0, {"a"}, {"1"}}, kPatience);
    other.close();
    CHECK_EQ(::access(path.text.c_str(), F_OK), 0);
  }
  CHECK_EQ(::access(path.text.c_str(), F_OK), -1);
}

TEST(a_file_of_something_else_is_told_from_a_store) {
  std::string requests[2];
  wire::encode(requests[0], Request{Op::Set, 0, {"a", "b"}, {"only one"}});
  wire::encode(requests[1], Request{Op::Add, 1, {}, {}});
  for (const std::string& bytes :
       {frame("no request"), frame(std::string(1, char(Op::Count))), requests[0], requests[1]}) {
    Path path;
    int fd = ::open(path.text.c_str(), O_WRONLY);
    CHECK_EQ(::write(fd, bytes.data(), bytes.size()), ssize_t(bytes.size()));
    ::close(fd);
    try {
      File file(path.text, 1);
      CHECK(!"opened");
    } catch (const Failure& failure) {
      CHECK(failure.kind == phalanx::Kind::Store);
    }
  }
}

TEST(a_record_that_its_writer_did_not_finish_is_written_over) {
  Path path;
  File one(path.text, -1);
  one.run({Op::Set, 0, {"a"}, {"1"}}, kPatience);
  int fd = ::open(path.text.c_str(), O_WRONLY | O_APPEND);
  CHECK_EQ(::write(fd, "\100\0\0\0begun", 9), 9);
  ::close(fd);
  one.run({Op::Set, 0, {"b"}, {"2"}}, kPatience);
  File other(path.text, -1);
  CHECK_EQ(get(other, "a") + get(other, "b"), "12");
}

TEST(a_server_drops_who_sends_nonsense_and_serves_the_others) {
  Served served;
  auto client = served.client();
  std::string request;
  wire::encode(request, Request{Op::Get, 0, {"a", "key"}, {"and", "values"}});
  std::vector<std::string> nonsense = {
      frame(""), frame("x"), frame(std::string(1, char(Op::Count)) + std::string(16, '\0')),
      std::string("\377\377\377\377", 4), std::string(3, '\0')};
  for (size_t cut = 1; cut < request.size(); cut += 3)
    nonsense.push_back(frame(request.substr(sizeof(wire::Length), cut)));
  for (bool known : {false, true})
    for (const std::string& bytes : nonsense) {
      Stranger stranger(served.server.port());
      if (known) stranger.shake_hands();
      stranger.send(bytes);
      ::shutdown(stranger.socket.fd(), SHUT_WR);
      stranger.rest();  // ends: it is hung up on
    }
  client->run({Op::Set, 0, {"a"}, {"1"}}, kPatience);
  CHECK_EQ(get(*client, "a"), "1");
}

TEST(a_reply_that_does_not_fit_its_request_is_no_reply) {
  for (const Reply& reply : {Reply{}, Reply{Status::Ok, 0, {"one", "too many"}}}) {
    Descriptor listener = listen_on("127.0.0.1", 0);
    std::thread liar([&] {
      Descriptor socket;
      while (!socket) socket = Descriptor(::accept(listener.fd(), nullptr, nullptr));
      auto read = [&](size_t size) {
        std::string bytes(size, '\0');
        CHECK_EQ(::recv(socket.fd(), bytes.data(), size, MSG_WAITALL), ssize_t(size));
        return bytes;
      };
      constexpr size_t kHead = sizeof(wire::Length);
      std::string hello = read(kHead + sizeof(uint64_t) + sizeof(Digest)), out;
      Digest mine{}, theirs;
      std::memcpy(theirs.data(), hello.data() + kHead + sizeof(uint64_t), theirs.size());
      handshake::encode(out, handshake::magic, uint8_t{0}, mine);
      ::send(socket.fd(), out.data(), out.size(), 0);
      read(kHead + sizeof(Digest));
      out.clear();
      handshake::encode(out, uint8_t{1},
                        handshake::proof(handshake::Role::Server, "", theirs, mine));
      wire::encode(out, reply);
      ::send(socket.fd(), out.data(), out.size(), 0);
      char byte;
      while (::recv(socket.fd(), &byte, 1, 0) > 0) continue;
    });
    {
      Client client("127.0.0.1", port_of(listener), "", kPatience);
      CHECK(failure_of(client, {Op::Get, 0, {"a"}}) == phalanx::Kind::Network);
    }
    liar.join();
  }
}

TEST(frames_are_what_they_were) {
  const Request request{Op::CompareSet, INT64_MIN, {"", "key"}, {std::string("\0\377", 2), ""}};
  std::string bytes;
  wire::encode(bytes, request);
  const Request back = wire::decode_request(std::string_view(bytes).substr(sizeof(wire::Length)));
  CHECK(back.op == request.op && back.number == request.number && back.keys == request.keys &&
        back.values == request.values);
  const Reply reply{Status::Cancelled, INT64_MAX, {"a", ""}};
  bytes.clear();
  wire::encode(bytes, reply);
  const Reply same = wire::decode_reply(std::string_view(bytes).substr(sizeof(wire::Length)));
  CHECK(same.status == reply.status && same.number == reply.number && same.values == reply.values);
  for (size_t cut = sizeof(wire::Length); cut < bytes.size(); ++cut)
    CHECK_THROWS(wire::decode_reply(std::string_view(bytes).substr(sizeof(wire::Length),
                                                                   cut - sizeof(wire::Length))),
                 wire::Malformed);
}

TEST(a_heart_beats_until_it_is_stopped) {
  Table table;
  Heart heart(table, "beat", 0.002);
  while (table.run({Op::Add, 0, {"beat"}}, kPatience).number < 5) std::this_thread::yield();
  CHECK(heart.silence() < 20);
  heart.stop();
  const auto last = table.run({Op::Add, 0, {"beat"}}, kPatience).number;
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK_EQ(table.run({Op::Add, 0, {"beat"}}, kPatience).number, last);
}
