// The process of a cache: takes the server's questions from a socket and has a few threads ask the library.
//
// Rules:
//  1. The process ends when the server closes its end of the socket, and is killed by the kernel when the server ends.
//  2. Questions are begun in their order and answered in any. A library is asked by several threads at once, as in tritonserver.
//  3. The server bounds how many questions there are at a time, and how large they are.
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <thread>

#include "caches.h"

namespace compiled {
namespace {

const int NUMBERS_MS = 1000;  // how often it is looked whether the gauges have changed
const size_t MOST_KEY = 4096;
const size_t MOST_TEXT = 4096;

struct Question {
  CacheQuestionHead head = {};
  std::string key, value;
};

struct CacheServer {
  int socket;
  size_t most;
  CacheLibrary library;
  std::mutex sending;
  std::mutex lock;
  std::condition_variable news;
  std::deque<Question> waiting;
  bool ended = false;

  bool send_all(const void* data, size_t size) {
    const char* at = static_cast<const char*>(data);
    while (size > 0) {
      const ssize_t sent = ::send(socket, at, size, MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent <= 0) return false;
      at += sent;
      size -= size_t(sent);
    }
    return true;
  }

  bool receive_all(void* data, size_t size) {
    char* at = static_cast<char*>(data);
    while (size > 0) {
      const ssize_t got = ::recv(socket, at, size, 0);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return false;
      at += got;
      size -= size_t(got);
    }
    return true;
  }

  void answer(uint32_t kind, int code, uint64_t number, const void* data, size_t size) {
    const CacheAnswerHead head = {kind, code, number, size};
    std::lock_guard<std::mutex> held(sending);
    if (send_all(&head, sizeof head)) send_all(data, size);
  }

  void told(uint32_t kind, int code, uint64_t number, const std::string& error) {
    answer(kind, code, number, error.data(), error.size() < MOST_TEXT ? error.size() : MOST_TEXT);
  }

  void work() {
    for (;;) {
      Question question;
      {
        std::unique_lock<std::mutex> held(lock);
        news.wait(held, [this] { return ended || !waiting.empty(); });
        if (ended) return;
        question = std::move(waiting.front());
        waiting.pop_front();
      }
      std::string found, error;
      int code;
      if (question.head.kind == CACHE_LOOKUP) {
        code = library.lookup(question.key, most, &found, &error);
      } else {
        code = library.insert(question.key, question.value, &error);
      }
      if (code == COMPILED_FINE) {
        answer(CACHE_ANSWERED, code, question.head.number, found.data(), found.size());
      } else {
        told(CACHE_ANSWERED, code, question.head.number, error);
      }
    }
  }

  // False at the end of the socket, or when what comes is no question.
  bool next() {
    Question question;
    if (!receive_all(&question.head, sizeof question.head)) return false;
    if (question.head.key_size > MOST_KEY || question.head.size > most) return false;
    question.key.resize(question.head.key_size);
    question.value.resize(question.head.size);
    if (!receive_all(&question.key[0], question.key.size())) return false;
    if (!receive_all(&question.value[0], question.value.size())) return false;
    std::lock_guard<std::mutex> held(lock);
    waiting.push_back(std::move(question));
    news.notify_one();
    return true;
  }

  int serve(const char* path, const char* config, unsigned count) {
    std::string error;
    const int code = library.begin(path, config, &error);
    if (code != COMPILED_FINE) {
      told(CACHE_BEGUN, code, 0, error);
      return 1;
    }
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < count; i++) threads.emplace_back([this] { work(); });
    answer(CACHE_BEGUN, COMPILED_FINE, 0, nullptr, 0);
    CacheNumbers before = {0, 0, 0};
    auto looked = std::chrono::steady_clock::now();
    pollfd waits = {socket, POLLIN, 0};
    for (;;) {
      const int ready = poll(&waits, 1, NUMBERS_MS);
      if (ready < 0 && errno != EINTR) break;
      if (ready > 0 && !next()) break;
      const auto now = std::chrono::steady_clock::now();
      if (now - looked < std::chrono::milliseconds(NUMBERS_MS)) continue;
      looked = now;
      const CacheNumbers numbers = cache_numbers();
      if (numbers == before) continue;
      answer(CACHE_NUMBERS, COMPILED_FINE, 0, &numbers, sizeof numbers);
      before = numbers;
    }
    {
      std::lock_guard<std::mutex> held(lock);
      ended = true;
    }
    news.notify_all();
    for (std::thread& thread : threads) thread.join();
    library.finish(&error);
    return 0;
  }
};

}  // namespace
}  // namespace compiled

// `server` is the process that has started this one; `most` bytes are in a value at most. Returns the exit status.
API int neptrio_cache_serve(int socket, int server, const char* title, const char* path, const char* config, size_t most,
                            unsigned threads) {
  prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
  if (getppid() != server) return 1;  // it has ended before
  prctl(PR_SET_NAME, title, 0, 0, 0);
  compiled::host_for_caches();
  compiled::CacheServer& made = *new compiled::CacheServer;  // threads of the library's may outlive this function
  made.socket = socket;
  made.most = most;
  return made.serve(path, config, threads);
}
