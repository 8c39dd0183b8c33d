// The library by itself, for sanitizers and for processors without Python: random problems of the
// C ABI against the formula in double, from several threads at once. Fails too if a hundred problems and more leave out what `coverage` lists.
//
//   native_test [problems] [seed] [calling threads]
#include <string>

#include "packed_problem.h"
#include "problem.h"
#include "team.h"
#include "workspaces.h"

namespace {

using native_test::compare;
using native_test::coverage;
using native_test::failures;

// Checks what a call gets that the library can't run.
void refused() {
    compare("an unknown level", -1, af_set_isa("abacus"), AF_BAD_ARGUMENT, 0);
    af_error error;
    float q[16] = {}, out[16];
    af_forward_args a = {};
    a.problem.threads = 1;
    a.problem.batch = a.problem.q_heads = a.problem.kv_heads = 1;
    a.problem.q_length = a.problem.kv_length = 1;
    a.problem.head_dim = a.problem.value_head_dim = 16;
    a.problem.query = a.problem.key = a.problem.value = {q, {16, 16, 16, 1}};
    a.out = {out, {16, 16, 16, 1}};
    compare("no workspace", -1, af_forward(&a, &error), AF_WORKSPACE_TOO_SMALL, 0);
    a.problem.batch = 0;
    compare("no rows", -1, double(af_forward_workspace(&a.problem)), 0, 0);
}

}  // namespace

int main(int count, char** arguments) {
    const int64_t problems = count > 1 ? std::atoll(arguments[1]) : 200;
    const uint64_t seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 0;
    const int callers = count > 3 ? std::atoi(arguments[3]) : 3;
    refused();
    coverage covered;
    std::string levels = af_isa_available();
    std::printf("levels: %s\n", levels.c_str());
    size_t at = 0;
    while (at <= levels.size()) {
        const size_t end = std::min(levels.find(',', at), levels.size());
        const std::string level = levels.substr(at, end - at);
        if (af_set_isa(level.c_str()) != AF_OK) return 1;
        covered.has_tiles |= native_test::has_tiles(level);
        for (const native_test::workspace& each : native_test::workspaces(level))
            if (each.found > each.most || each.found < each.least) {
                ++failures;
                std::printf("%s: a workspace of %" PRId64 " bytes, stated are %" PRId64
                            " to %" PRId64 "\n",
                            each.what.c_str(), each.found, each.least, each.most);
            }
        std::atomic<int64_t> next{0};
        // Half of them on threads of the library's own, half on another runtime's.
        for (const int64_t last : {problems / 2, problems}) {
            native_test::share_threads(last == problems);
            std::vector<std::thread> threads;
            for (int i = 0; i < callers; ++i)
                threads.emplace_back([&] {
                    for (int64_t n; (n = next++) < last;)
                        if (n % 8 == 0)
                            native_test::packed_problem(n, seed).run(covered);
                        else
                            native_test::problem(n, seed).run(covered);
                });
            for (std::thread& each : threads) each.join();
            next = last;
        }
        std::printf("%s: %" PRId64 " problems, %d failures so far\n", level.c_str(), problems,
                    failures.load());
        at = end + 1;
    }
    covered.calls_on_teams = native_test::teams.load();
    covered.each([&](const char* what, int64_t found) {
        if (found < 0) {
            std::printf("       -  %s: no level here has them\n", what);
            return;
        }
        std::printf("%8" PRId64 "  %s\n", found, what);
        if (problems >= 100) compare(what, -1, double(found > 0), 1, 0);
    });
    return failures.load() ? 1 : 0;
}
