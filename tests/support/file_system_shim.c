/* Preloaded into processes: calls on files whose path has a text fail, or read and write less, with a
   probability; the clock of a node differs. Both are in a file that all of them map; see
   file_system_shim.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>
#include <time.h>

enum { OPEN = 1, READ = 2, WRITE = 4, SYNC = 8, NAMES = 16 };
struct rule { uint32_t calls; int32_t error; uint32_t per_million; uint32_t struck; char path[240]; };
struct clock { int32_t ahead_s; char node[60]; };
static volatile struct rule *rule;
static volatile struct clock *clocks;  /* of four nodes */

__attribute__((constructor)) static void map_rule(void) {
    const char *file = getenv("FREETRAIN_SHIM");
    if (!file) return;
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
    int fd = real(file, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    void *page = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (page == MAP_FAILED) return;
    clocks = (struct clock *)((char *)page + 1024);
    rule = page;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    const char *node = !failed && clock == CLOCK_REALTIME && clocks ? getenv("FREETRAIN_NODE") : 0;
    for (int i = 0; node && i < 4; i++)
        if (!strcmp(node, (const char *)clocks[i].node)) now->tv_sec += clocks[i].ahead_s;
    return failed;
}

static int strikes(uint32_t call, const char *path, int fd) {
    char name[4096], link[64];
    if (!rule || !(rule->calls & call)) return 0;
    if (!path) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t size = readlink(link, name, sizeof name - 1);
        if (size <= 0 || name[0] != '/') return 0;
        name[size] = 0;
        path = name;
    }
    if (!strstr(path, (const char *)rule->path)) return 0;
    static __thread unsigned seed;
    if (!seed) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); seed = t.tv_nsec ^ getpid(); }
    if (rand_r(&seed) % 1000000 >= rule->per_million) return 0;
    __sync_fetch_and_add(&((struct rule *)rule)->struck, 1);
    return 1;
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name)
#define FAIL do { errno = rule->error; return -1; } while (0)
#define LESS(size) (rule->error || (size) < 2 ? (size) : (size) / 2)

#define OPENS(name) int name(const char *path, int flags, ...) { \
    REAL(name); va_list given; va_start(given, flags); mode_t mode = va_arg(given, mode_t); va_end(given); \
    if (strikes(OPEN, path, -1) && rule->error) { FAIL; } return real(path, flags, mode); }
OPENS(open)
OPENS(open64)
#define OPENS_AT(name) int name(int at, const char *path, int flags, ...) { \
    REAL(name); va_list given; va_start(given, flags); mode_t mode = va_arg(given, mode_t); va_end(given); \
    if (strikes(OPEN, path, -1) && rule->error) { FAIL; } return real(at, path, flags, mode); }
OPENS_AT(openat)
OPENS_AT(openat64)

ssize_t read(int fd, void *data, size_t size) {
    REAL(read); if (strikes(READ, 0, fd)) { if (rule->error) FAIL; size = LESS(size); } return real(fd, data, size); }
ssize_t write(int fd, const void *data, size_t size) {
    REAL(write); if (strikes(WRITE, 0, fd)) { if (rule->error) FAIL; size = LESS(size); } return real(fd, data, size); }
#define AT(name, call, kind, offset) ssize_t name(int fd, kind data, size_t size, offset place) { \
    REAL(name); if (strikes(call, 0, fd)) { if (rule->error) FAIL; size = LESS(size); } return real(fd, data, size, place); }
AT(pread, READ, void *, off_t)
AT(pread64, READ, void *, off64_t)
AT(pwrite, WRITE, const void *, off_t)
AT(pwrite64, WRITE, const void *, off64_t)
#define VECTOR(name, offset) ssize_t name(int fd, const struct iovec *parts, int count, offset place) { \
    REAL(name); if (strikes(READ, 0, fd) && rule->error) FAIL; return real(fd, parts, count, place); }
VECTOR(preadv, off_t)
VECTOR(preadv64, off64_t)
int fsync(int fd) { REAL(fsync); if (strikes(SYNC, 0, fd) && rule->error) FAIL; return real(fd); }
int fdatasync(int fd) { REAL(fdatasync); if (strikes(SYNC, 0, fd) && rule->error) FAIL; return real(fd); }
#define NAMED(name) (const char *path) { REAL(name); if (strikes(NAMES, path, -1) && rule->error) FAIL; return real(path); }
int unlink NAMED(unlink)
int rmdir NAMED(rmdir)
int mkdir(const char *path, mode_t mode) {
    REAL(mkdir); if (strikes(NAMES, path, -1) && rule->error) FAIL; return real(path, mode); }
int rename(const char *from, const char *to) {
    REAL(rename); if (strikes(NAMES, from, -1) && rule->error) FAIL; return real(from, to); }
