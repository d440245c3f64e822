// Forward-backward and best paths over a canvas, compiled on the user's machine at first use.
//
// Positions depend on each other in order, and each is a few hundred small sums: numpy spends its time between them.
// The reference implementation is sampling/forward_backward.py; arrays and names are as there. One thread; sums in the
// order of the edges.

#include <math.h>
#include <stdint.h>
#include <string.h>

extern "C" {

struct Dfa {
    int64_t states, classes, edges, sets, members;
    const int64_t *edge_from, *edge_to, *edge_set;    // [edges], ascending by edge_from
    const int64_t *set_begins, *set_members;          // [sets], [members]
    const int64_t *begins;                            // [states + 1]
    const int64_t *transition_class, *transition_to;  // [transitions]
};

// Each class set's log mass, or its best member's, from those of the classes: [canvas, classes] -> [canvas, sets].
void sum_sets(const Dfa *dfa, const double *emissions, int64_t canvas, int adds, double *sums) {
    for (int64_t at = 0; at < canvas; at++) {
        const double *own = emissions + at * dfa->classes;
        for (int64_t set = 0; set < dfa->sets; set++) {
            int64_t end = set + 1 < dfa->sets ? dfa->set_begins[set + 1] : dfa->members;
            double top = -INFINITY, sum = 0;
            for (int64_t i = dfa->set_begins[set]; i < end; i++) top = fmax(top, own[dfa->set_members[i]]);
            if (adds && top > -INFINITY) {
                for (int64_t i = dfa->set_begins[set]; i < end; i++) sum += exp(own[dfa->set_members[i]] - top);
                top += log(sum);
            }
            sums[at * dfa->sets + set] = top;
        }
    }
}

// What can follow each state: betas [canvas + 1, states], whose last row is given.
void backward(const Dfa *dfa, const double *sums, int64_t canvas, int adds, double *betas) {
    for (int64_t at = canvas - 1; at >= 0; at--) {
        const double *own = sums + at * dfa->sets, *next = betas + (at + 1) * dfa->states;
        double *beta = betas + at * dfa->states;
        for (int64_t state = 0; state < dfa->states; state++) beta[state] = -INFINITY;
        for (int64_t begin = 0, end; begin < dfa->edges; begin = end) {
            int64_t from = dfa->edge_from[begin];
            double top = -INFINITY, sum = 0;
            for (end = begin; end < dfa->edges && dfa->edge_from[end] == from; end++)
                top = fmax(top, own[dfa->edge_set[end]] + next[dfa->edge_to[end]]);
            if (adds && top > -INFINITY && end - begin > 1) {
                for (int64_t i = begin; i < end; i++) sum += exp(own[dfa->edge_set[i]] + next[dfa->edge_to[i]] - top);
                top += log(sum);
            }
            beta[from] = top;
        }
    }
}

// Probability of each class at each position [canvas, classes]. Scratch: two of [states], one of [sets].
void marginals(const Dfa *dfa, const double *emissions, const double *sums, const double *betas, int64_t canvas,
               int64_t start_state, double *alpha, double *next_alpha, double *set_probs, double *found) {
    memset(alpha, 0, sizeof(double) * dfa->states);
    memset(found, 0, sizeof(double) * canvas * dfa->classes);
    alpha[start_state] = 1;
    for (int64_t at = 0; at < canvas; at++) {
        const double *own = sums + at * dfa->sets, *beta = betas + at * dfa->states, *next = beta + dfa->states;
        memset(next_alpha, 0, sizeof(double) * dfa->states);
        memset(set_probs, 0, sizeof(double) * dfa->sets);
        for (int64_t i = 0; i < dfa->edges; i++) {
            int64_t from = dfa->edge_from[i], to = dfa->edge_to[i], set = dfa->edge_set[i];
            double path = own[set] + next[to];
            if (alpha[from] == 0 || path == -INFINITY) continue;
            double prob = exp(path - beta[from]) * alpha[from];
            set_probs[set] += prob;
            next_alpha[to] += prob;
        }
        for (int64_t set = 0; set < dfa->sets; set++) {
            if (set_probs[set] == 0) continue;
            int64_t end = set + 1 < dfa->sets ? dfa->set_begins[set + 1] : dfa->members;
            for (int64_t i = dfa->set_begins[set]; i < end; i++) {
                int64_t symbol = dfa->set_members[i];
                found[at * dfa->classes + symbol] += set_probs[set] * exp(emissions[at * dfa->classes + symbol] - own[set]);
            }
        }
        double *swapped = alpha;
        alpha = next_alpha, next_alpha = swapped;
    }
}

// From the start state, at each position the best transition together with what can follow it: classes [canvas].
// Returns the number of positions done: a state without transitions ends the path.
int64_t best_path(const Dfa *dfa, const double *values, const double *betas, int64_t canvas, int64_t start_state,
                  int64_t *path) {
    int64_t state = start_state;
    for (int64_t at = 0; at < canvas; at++) {
        const double *own = values + at * dfa->classes, *next = betas + (at + 1) * dfa->states;
        int64_t best = dfa->begins[state];
        if (best == dfa->begins[state + 1]) return at;
        double top = own[dfa->transition_class[best]] + next[dfa->transition_to[best]];
        for (int64_t i = best + 1; i < dfa->begins[state + 1]; i++) {
            double value = own[dfa->transition_class[i]] + next[dfa->transition_to[i]];
            if (value > top) top = value, best = i;
        }
        path[at] = dfa->transition_class[best];
        state = dfa->transition_to[best];
    }
    return canvas;
}
}
