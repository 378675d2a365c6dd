/* Calls the plugin as NCCL does. Usage: stand_in LIBRARY VERSION COMMUNICATORS OPERATIONS CASE
 * Each communicator has a thread that issues operations, as the caller of NCCL does, and one that plays their kernels, as
 * NCCL's proxy does. Cases: plain, graph (one operation is played many times), fork, again (all communicators are
 * destroyed, the library is unloaded and loaded again), many (more communicators than the plugin knows), stuck (the last
 * operation never ends, as one that another rank does not enter), loop (so many operations after each pause, until the
 * input ends, by a timer that is an hour ahead). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <poll.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

struct description {
  uint64_t type;
  void *parent;
  int rank;
  union {
    struct { uint64_t sequence; const char *function; const void *from; void *to; size_t count; int root;
             const char *datatype; uint8_t channels, warps; const char *algorithm, *protocol; void *group; } collective;
    struct { uint8_t channel; uint64_t timer; } kernel;
  };
};
struct profiler {
  const char *name;
  void *begin;
  int (*start)(void *, void **, struct description *);
  int (*stop)(void *);
  int (*change)(void *, int, uint64_t *);
  int (*end)(void *);
};
typedef int (*begin_4)(void **, int *, const char *, uint64_t, int, int, int, void *);
typedef int (*begin_5)(void **, uint64_t, int *, const char *, int, int, int, void *);

static struct profiler *plugin;
static void *library;
static int version, mask;
static long operations;
static int is_graph, is_stuck;

struct communicator { void *context; uint64_t hash; };

static void load(const char *path) {
  char symbol[32];
  snprintf(symbol, sizeof symbol, "ncclProfiler_v%d", version);
  library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  plugin = library ? dlsym(library, symbol) : NULL;
  if (!plugin) fprintf(stderr, "%s\n", dlerror()), exit(2);
}

static void begin(struct communicator *made, uint64_t hash) {
  made->context = NULL, made->hash = hash;
  int failed = version == 4 ? ((begin_4)plugin->begin)(&made->context, &mask, "name", hash, 1, 4, 2, NULL)
                            : ((begin_5)plugin->begin)(&made->context, hash, &mask, NULL, 1, 4, 2, NULL);
  if (failed) fprintf(stderr, "init failed\n"), exit(3);
}

static void *issue(struct communicator *on, long number) {
  struct description told;
  memset(&told, 0xab, sizeof told); /* what NCCL does not set is undefined */
  if (version == 4) *(uint8_t *)&told.type = 2; else told.type = 2;
  told.parent = NULL, told.rank = 2;
  told.collective.sequence = (uint64_t)number, told.collective.function = "AllReduce", told.collective.count = 1000;
  told.collective.datatype = "ncclBfloat16", told.collective.channels = 2;
  told.collective.algorithm = "RING", told.collective.protocol = "SIMPLE";
  void *handle = NULL;
  plugin->start(on->context, &handle, &told);
  return handle;
}

static void play(struct communicator *on, void *operation, long number) {
  for (int channel = 3; channel < 5; channel++) { /* not from 0: small collectives share a launch */
    struct description told;
    memset(&told, 0xab, sizeof told);
    if (version == 4) *(uint8_t *)&told.type = 64; else told.type = 64;
    told.parent = operation, told.kernel.channel = (uint8_t)channel;
    told.kernel.timer = 1000000 + 1000 * (uint64_t)number;
    void *handle = NULL;
    plugin->start(on->context, &handle, &told);
    uint64_t stop = told.kernel.timer + 700;
    if (is_stuck && number + 1 == operations) continue;
    if (handle) plugin->change(handle, 22, &stop), plugin->stop(handle);
  }
}

static void *run(void *argument) {
  struct communicator *on = argument;
  void *captured = is_graph ? issue(on, 0) : NULL;
  for (long number = 0; number < operations; number++) {
    void *operation = issue(on, number);
    if (operation) plugin->stop(operation);
    play(on, operation, number);
    if (is_graph) play(on, captured, number);
  }
  return NULL;
}

static void loop(struct communicator *on) {
  struct pollfd input = {.fd = 0, .events = POLLIN};
  for (long number = 0; poll(&input, 1, 20) == 0;) { /* a pause of 20 ms */
    for (long end = number + operations; number < end; number++) {
      struct timespec now;
      void *operation = issue(on, number);
      clock_gettime(CLOCK_MONOTONIC, &now);
      play(on, operation, (now.tv_sec + 3600) * 1000000 + now.tv_nsec / 1000);
    }
  }
}

int main(int count, char **words) {
  if (count != 6) return 2;
  version = atoi(words[2]);
  int communicators = atoi(words[3]), rounds = !strcmp(words[5], "again") ? 3 : 1;
  operations = atol(words[4]), is_graph = !strcmp(words[5], "graph"), is_stuck = !strcmp(words[5], "stuck");
  struct communicator all[256];
  pthread_t threads[256];
  for (int round = 0; round < rounds; round++) {
    load(words[1]);
    for (int n = 0; n < communicators; n++) begin(&all[n], 0x1111111100000000u + (uint64_t)n + 1);
    if (!strcmp(words[5], "fork")) {
      pid_t child = fork();
      if (!child) run(&all[0]), _exit(0);
      int status = 0;
      waitpid(child, &status, 0);
      if (status) return 4;
    }
    if (!strcmp(words[5], "loop")) return loop(&all[0]), 0;
    for (int n = 0; n < communicators; n++) pthread_create(&threads[n], NULL, run, &all[n]);
    for (int n = 0; n < communicators; n++) pthread_join(threads[n], NULL);
    plugin->start(NULL, &(void *){NULL}, &(struct description){.type = 2}); /* of a communicator without context */
    if (round + 1 < rounds || is_stuck || !strcmp(words[5], "plain")) {
      printf("mask %d\n", mask);
      if (round + 1 == rounds) return 0; /* a job that never destroys its communicators */
    }
    for (int n = 0; n < communicators; n++) plugin->end(all[n].context);
    dlclose(library);
  }
  return 0;
}
