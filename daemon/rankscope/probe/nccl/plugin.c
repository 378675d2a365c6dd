/* A profiler plugin of NCCL (interface versions 4 to 6): how long each collective and each message is on the GPU, as
 * records in memory that the probe made and the daemon reads (nccl_layout.py describes it).
 *
 * Nothing here may harm the job. There is no thread, no lock and no allocation in what NCCL calls for an operation.
 * `init` never fails: NCCL counts a failed one twice when it decides to unload the library, and would unload it under
 * other communicators. A process that has the memory of another (fork) or none (exec) records nothing. NCCL may hand
 * back a handle long after: for a CUDA graph, all replays have the parent of the capture. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* Of NCCL: kinds of events and the one state that is of interest. */
enum { GROUP = 1 << 0, COLLECTIVE = 1 << 1, MESSAGE = 1 << 2, KERNEL = 1 << 6 };
enum { KERNEL_STOP = 22 };

struct description {
  uint64_t type; /* one byte in version 4, the others are undefined */
  void *parent;
  int rank;
  union {
    struct { uint64_t sequence; const char *function; const void *from; void *to; size_t count; int root;
             const char *datatype; uint8_t channels, warps; const char *algorithm, *protocol; } collective;
    struct { const char *function; void *buffer; const char *datatype; size_t count; int peer; } message;
    struct { uint8_t channel; uint64_t timer; } kernel;
  };
};
union arguments { struct { uint64_t timer; } kernel; };
typedef void (*logger)(int, unsigned long, const char *, int, const char *, ...);

/* Of the memory: as nccl_layout.py has it. */
enum { COMMUNICATORS = 64, RECORDS = 1 << 14, HEADER_BYTES = 8192, LAYOUT_VERSION = 1 };

struct record {
  _Atomic uint64_t number; /* from 1, stored last; 0 while the record is written */
  uint64_t start, stop;    /* of the GPU's timer, nanoseconds */
  uint64_t issued, seen;   /* CLOCK_MONOTONIC of the host, nanoseconds: when it was issued, and was found to be over */
  uint64_t bytes;
  uint32_t communicator; /* low half of its hash */
  uint32_t sequence;     /* of its function, in its communicator */
  int32_t peer;          /* of a message; else -1 */
  uint8_t function, algorithm, protocol, channels;
};
struct communicator {
  _Atomic uint64_t hash; /* 0: free */
  uint32_t ranks, rank;
  _Atomic uint64_t issued, started, finished; /* operations */
  _Atomic uint64_t last_issued, last_started, last_finished; /* sequence << 8 | function */
};
struct memory {
  char magic[8];
  uint32_t version, header_bytes, record_bytes, capacity;
  int64_t pid;
  uint64_t id;
  uint32_t checksum, pad;
  uint64_t room[2];
  _Atomic uint64_t written, lost; /* at 64 */
  _Atomic uint32_t wanted;        /* events, by the probe */
  _Atomic uint32_t interface;     /* version that NCCL chose */
  uint64_t more[5];
  struct communicator communicators[COMMUNICATORS]; /* at 128 */
};
_Static_assert(sizeof(struct record) == 64 && sizeof(struct communicator) == 64, "as in nccl_layout.py");
_Static_assert(offsetof(struct memory, written) == 64 && offsetof(struct memory, communicators) == 128, "likewise");
_Static_assert(sizeof(struct memory) <= HEADER_BYTES, "likewise");

/* What was issued and may still run. Kept for a while after it ended, because a graph may play it again. */
enum { OPERATIONS = 1 << 13, KERNELS = 1 << 13, TRIES = 16, ROUNDS = 4 };
struct operation {
  int kind;
  struct context *context;
  uint64_t issued, bytes;
  uint32_t sequence;
  int32_t peer;
  uint8_t function, algorithm, protocol, channels;
  _Atomic int channel;          /* whose times are taken: the first that starts; -1 before */
  _Atomic uint32_t starts, last; /* how often it was started; `operations` when it was issued or last started */
  _Atomic int is_open;           /* it has not ended */
};
struct kernel {
  int kind;
  struct operation *operation;
  uint64_t start;
  _Atomic uint32_t last; /* `kernels` when it was started */
  _Atomic int is_open;
};
struct context {
  struct communicator *seen; /* NULL: the table is full */
  int *mask;
  uint32_t low;
};
static struct operation operation_pool[OPERATIONS];
static struct kernel kernel_pool[KERNELS];
static struct context contexts[COMMUNICATORS];
static struct context unseen;
static _Atomic uint32_t operations, kernels;

static struct memory *memory;
static struct record *records;
static volatile char *mine; /* a page that is empty in a forked process */
static atomic_flag changing = ATOMIC_FLAG_INIT; /* what follows; by init and finalize only */
static int recorded; /* communicators */

static uint64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static int same(const char *one, const char *other) {
  while (*one && *one == *other) one++, other++;
  return *one == *other;
}

/* The place of a name in a list that ends with NULL, from 1; 0 for another. */
static uint8_t place(const char *name, const char *const *names) {
  for (uint8_t number = 1; name && *names; number++, names++)
    if (same(name, *names)) return number;
  return 0;
}
static const char *const FUNCTIONS[] = {"AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce", "AlltoAll",
                                        "Gather", "Scatter", "SendRecv", "Send", "Recv", NULL};
static const char *const ALGORITHMS[] = {"RING", "TREE", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT",
                                         NULL};
static const char *const PROTOCOLS[] = {"LL", "LL128", "SIMPLE", NULL};

/* Bytes of an element, from the number of bits in a name such as ncclFloat16 or ncclFloat8e4m3; 0 if unknown. */
static unsigned element_bytes(const char *datatype) {
  unsigned bits = 0;
  while (datatype && *datatype && (*datatype < '0' || *datatype > '9')) datatype++;
  while (datatype && *datatype >= '0' && *datatype <= '9' && bits < 100) bits = 10 * bits + (unsigned)(*datatype++ - '0');
  return bits / 8;
}

static int is_mine(void) { return mine && *mine; }

/* RANKSCOPE_NCCL_MEMORY: descriptor, inode and device of the memory. After exec the descriptor is closed, or another file. */
static int number(const char **text, uint64_t *value) {
  char *end;
  if (!*text || **text < '0' || **text > '9') return 0;
  *value = strtoull(*text, &end, 10);
  *text = *end == ':' ? end + 1 : end;
  return 1;
}

static void map(void) {
  const char *text = getenv("RANKSCOPE_NCCL_MEMORY");
  uint64_t descriptor, inode, device;
  struct stat found;
  size_t bytes = HEADER_BYTES + RECORDS * sizeof(struct record);
  if (!number(&text, &descriptor) || !number(&text, &inode) || !number(&text, &device)) return;
  if (fstat((int)descriptor, &found) || found.st_ino != inode || found.st_dev != device) return;
  if ((uint64_t)found.st_size != bytes) return;
  char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return;
  struct memory *mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, (int)descriptor, 0);
  if (mapped != MAP_FAILED) {
    if (!madvise(page, 4096, MADV_WIPEONFORK) && same(mapped->magic, "RNKSNCL") && mapped->version == LAYOUT_VERSION &&
        mapped->record_bytes == sizeof(struct record) && mapped->capacity == RECORDS && mapped->pid == getpid()) {
      *page = 1;
      memory = mapped;
      records = (struct record *)((char *)mapped + HEADER_BYTES);
      mine = page;
      return;
    }
    munmap(mapped, bytes);
  }
  munmap(page, 4096);
}

static void unmap(void) {
  void *page = (void *)mine, *mapped = memory;
  mine = NULL;
  memory = NULL;
  if (page) munmap(page, 4096);
  if (mapped) munmap(mapped, HEADER_BYTES + RECORDS * sizeof(struct record));
}

/* False where another thread does not leave: in a process that was forked while it was inside. */
static int enter(void) {
  for (long tries = 0; tries < 100000; tries++) {
    if (!atomic_flag_test_and_set_explicit(&changing, memory_order_acquire)) return 1;
    sched_yield();
  }
  return 0;
}
static void leave(void) { atomic_flag_clear_explicit(&changing, memory_order_release); }

static int begin(void **context, int *mask, uint64_t hash, int ranks, int rank, unsigned interface) {
  *context = &unseen;
  if (!enter()) return 0;
  if (mine && !*mine) mine = NULL, memory = NULL, recorded = 0; /* forked: the memory is the parent's */
  if (!memory) map();
  if (memory) {
    atomic_store(&memory->interface, interface);
    for (int n = 0; n < COMMUNICATORS && *context == &unseen; n++) {
      struct communicator *seen = &memory->communicators[n];
      if (atomic_load(&seen->hash)) continue;
      seen->ranks = (uint32_t)ranks, seen->rank = (uint32_t)rank;
      atomic_store(&seen->issued, 0), atomic_store(&seen->started, 0), atomic_store(&seen->finished, 0);
      atomic_store(&seen->last_issued, 0), atomic_store(&seen->last_started, 0), atomic_store(&seen->last_finished, 0);
      atomic_store(&seen->hash, hash ? hash : 1);
      contexts[n] = (struct context){seen, mask, (uint32_t)hash};
      *context = &contexts[n];
      recorded++;
    }
    __atomic_store_n(mask, (int)atomic_load(&memory->wanted), __ATOMIC_RELAXED);
  }
  leave();
  return 0;
}

static int end(void *context) {
  struct context *of = context;
  if (!of || of == &unseen || !enter()) return 0;
  if (is_mine()) atomic_store(&of->seen->hash, 0);
  if (--recorded == 0) unmap(); /* NCCL may unload the library next */
  leave();
  return 0;
}

/* `last` may be a little later than `turn`, which another thread took meanwhile. */
static int is_recent(uint32_t turn, uint32_t last, int32_t places) {
  return (int32_t)(turn - last) <= ROUNDS * places;
}

/* A place that no operation needs: not one that runs, or that a graph has played again lately. */
static struct operation *fresh(void) {
  for (int tries = 0; tries < TRIES; tries++) {
    uint32_t turn = atomic_fetch_add_explicit(&operations, 1, memory_order_relaxed);
    struct operation *found = &operation_pool[turn % OPERATIONS];
    int is_needed = atomic_load(&found->is_open) || atomic_load(&found->starts) > 1;
    if (is_needed && is_recent(turn, atomic_load(&found->last), OPERATIONS)) continue;
    atomic_store(&found->last, turn);
    atomic_store(&found->is_open, 1);
    return found;
  }
  atomic_fetch_add(&memory->lost, 1);
  return NULL;
}

static void *issue(struct context *of, const struct description *told, int kind) {
  struct operation *made = fresh();
  if (!made) return NULL;
  made->kind = kind;
  made->context = of;
  made->issued = now();
  if (kind == COLLECTIVE) {
    made->sequence = (uint32_t)told->collective.sequence;
    made->function = place(told->collective.function, FUNCTIONS);
    made->algorithm = place(told->collective.algorithm, ALGORITHMS);
    made->protocol = place(told->collective.protocol, PROTOCOLS);
    made->channels = told->collective.channels;
    made->bytes = told->collective.count * element_bytes(told->collective.datatype);
    made->peer = -1;
  } else {
    made->sequence = 0;
    made->function = place(told->message.function, FUNCTIONS);
    made->algorithm = made->protocol = made->channels = 0;
    made->bytes = told->message.count * element_bytes(told->message.datatype);
    made->peer = told->message.peer;
  }
  atomic_store(&made->channel, -1);
  atomic_store(&made->starts, 0);
  atomic_fetch_add(&of->seen->issued, 1);
  atomic_store(&of->seen->last_issued, (uint64_t)made->sequence << 8 | made->function);
  return made;
}

static struct kernel *fresh_kernel(void) {
  for (int tries = 0; tries < TRIES; tries++) {
    uint32_t turn = atomic_fetch_add_explicit(&kernels, 1, memory_order_relaxed);
    struct kernel *found = &kernel_pool[turn % KERNELS];
    if (atomic_load(&found->is_open) && is_recent(turn, atomic_load(&found->last), KERNELS)) continue;
    atomic_store(&found->last, turn);
    atomic_store(&found->is_open, 1);
    return found;
  }
  atomic_fetch_add(&memory->lost, 1);
  return NULL;
}

/* Each channel of an operation has a kernel event. The first one stands for all. */
static void *launch(struct context *of, const struct description *told) {
  struct operation *parent = told->parent;
  if (!parent) return NULL;
  if (parent->context != of) { /* its place was taken by an operation of another communicator */
    atomic_fetch_add(&memory->lost, 1);
    return NULL;
  }
  int expected = -1, channel = told->kernel.channel;
  if (!atomic_compare_exchange_strong(&parent->channel, &expected, channel) && expected != channel) return NULL;
  atomic_fetch_add(&parent->starts, 1);
  atomic_store(&parent->last, atomic_load_explicit(&operations, memory_order_relaxed));
  atomic_fetch_add(&of->seen->started, 1);
  atomic_store(&of->seen->last_started, (uint64_t)parent->sequence << 8 | parent->function);
  struct kernel *made = fresh_kernel();
  if (made) made->kind = KERNEL, made->operation = parent, made->start = told->kernel.timer;
  return made;
}

static int start(void *context, void **handle, const struct description *told, unsigned type) {
  struct context *of = context;
  *handle = NULL;
  if (!of || of == &unseen || !is_mine()) return 0;
  int wanted = (int)atomic_load_explicit(&memory->wanted, memory_order_relaxed);
  if (__atomic_load_n(of->mask, __ATOMIC_RELAXED) != wanted) __atomic_store_n(of->mask, wanted, __ATOMIC_RELAXED);
  if (type == COLLECTIVE || type == MESSAGE) *handle = issue(of, told, (int)type);
  if (type == KERNEL) *handle = launch(of, told);
  return 0;
}

static int change(void *handle, int state, const union arguments *told) {
  struct kernel *ended = handle;
  if (!ended || ended->kind != KERNEL || state != KERNEL_STOP || !told || !is_mine()) return 0;
  struct operation *of = ended->operation;
  struct communicator *seen = of->context->seen;
  uint64_t number = 1 + atomic_fetch_add(&memory->written, 1);
  struct record *made = &records[(number - 1) % RECORDS];
  atomic_store_explicit(&made->number, 0, memory_order_release);
  atomic_thread_fence(memory_order_release);
  made->start = ended->start;
  made->stop = told->kernel.timer;
  made->issued = of->issued;
  made->seen = now();
  made->bytes = of->bytes;
  made->communicator = of->context->low;
  made->sequence = of->sequence;
  made->peer = of->peer;
  made->function = of->function, made->algorithm = of->algorithm;
  made->protocol = of->protocol, made->channels = of->channels;
  atomic_store_explicit(&made->number, number, memory_order_release);
  atomic_store(&of->is_open, 0);
  atomic_store(&ended->is_open, 0);
  atomic_fetch_add(&seen->finished, 1);
  atomic_store(&seen->last_finished, (uint64_t)of->sequence << 8 | of->function);
  return 0;
}

static int stop(void *handle) {
  (void)handle;
  return 0;
}

static int begin_4(void **context, int *mask, const char *name, uint64_t hash, int nodes, int ranks, int rank, logger log) {
  (void)name, (void)nodes, (void)log;
  return begin(context, mask, hash, ranks, rank, 4);
}
static int begin_5(void **context, uint64_t hash, int *mask, const char *name, int nodes, int ranks, int rank, logger log) {
  (void)name, (void)nodes, (void)log;
  return begin(context, mask, hash, ranks, rank, 5);
}
static int begin_6(void **context, uint64_t hash, int *mask, const char *name, int nodes, int ranks, int rank, logger log) {
  (void)name, (void)nodes, (void)log;
  return begin(context, mask, hash, ranks, rank, 6);
}
static int start_4(void *context, void **handle, const struct description *told) {
  return start(context, handle, told, (uint8_t)told->type);
}
static int start_5(void *context, void **handle, const struct description *told) {
  return start(context, handle, told, told->type > KERNEL ? 0 : (unsigned)told->type);
}

typedef int (*starting)(void *, void **, const struct description *);
struct profiler_4 {
  const char *name;
  int (*begin)(void **, int *, const char *, uint64_t, int, int, int, logger);
  starting start;
  int (*stop)(void *);
  int (*change)(void *, int, const union arguments *);
  int (*end)(void *);
};
struct profiler_5 {
  const char *name;
  int (*begin)(void **, uint64_t, int *, const char *, int, int, int, logger);
  starting start;
  int (*stop)(void *);
  int (*change)(void *, int, const union arguments *);
  int (*end)(void *);
};
#define EXPORTED __attribute__((visibility("default")))
EXPORTED const struct profiler_4 ncclProfiler_v4 = {"rankscope", begin_4, start_4, stop, change, end};
EXPORTED const struct profiler_5 ncclProfiler_v5 = {"rankscope", begin_5, start_5, stop, change, end};
EXPORTED const struct profiler_5 ncclProfiler_v6 = {"rankscope", begin_6, start_5, stop, change, end};
