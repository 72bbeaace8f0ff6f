"""The template's notebook as text: each cell begins with "%% kind id tags"."""

LESSON = '''\
%% markdown title
# @NUMBER@ · @TITLE@

**The question:** what does a longer answer cost?

After this chapter you can

- generate a few tokens with a loop of your own;
- say how the KV cache grows with each step, to the byte;
- say why a step must not feed a token twice.

**Builds on:** chapter 1: prefill, decode, KV cache.

**Time:** about 5 minutes, and as long again for the exercises.

> **To do:** ask your chapter's question in one sentence. List three to five things that one can do
> after it, and name the chapters that it needs. The index of the track is made from this cell. A
> small example follows; replace all of it. Every hint like this one has to go in the end:
> `infer-lab lint` counts them.

%% code banner nbval-ignore-output
from infer_lab import course

course.banner()

%% code imports
import inspect
import time

import torch

from infer_lab import Tokenizer, load_model, viz

check = course.checks("@PLACE@")  # for the exercises

%% markdown build
`load_model` takes a GPU if there is one, and every tensor we make goes to `model.device`. float32
by name: results then hold from machine to machine.

## 1. Build it by hand

> **To do:** go in small steps, the naive way first. One idea a cell, 3 to 15 lines. Before a cell
> say what to expect; after it look at what came out. Every claim is an `assert` or a figure.
> Explain a new word where it first stands, in bold, and add it to GLOSSARY.md. A word that is only
> stressed is *italic*.

Which tokens go in? Expect one for each word, since all of them are frequent.

%% code load
tokenizer = Tokenizer.from_pretrained()
model = load_model(dtype="float32")

prompt = "The capital of France is"
prompt_ids = tokenizer.encode(prompt)
print(tokenizer.pieces(prompt_ids))

%% markdown loop-text
The naive loop computes everything again for each token. How many tokens go through the model for
three new ones?

> **To do:** an example that is chosen greedily must be clear, or another machine chooses otherwise:
> the two likeliest tokens lie more than 0.1 apart in logits at every step. List its prompt in
> `GREEDY` of checks.py; the tests measure it.

%% code loop
from infer_lab.kv_cache import CacheSpec, ContiguousKVCache, NoCache
from infer_lab.prefill import prefill

sequence, computed = list(prompt_ids), 0
for _ in range(3):
    logits = prefill(model, sequence, NoCache())  # (V,)
    computed += len(sequence)
    sequence.append(int(logits.argmax()))

by_hand = sequence[len(prompt_ids) :]
print(repr(tokenizer.decode(by_hand)), "after", computed, "tokens computed")
assert computed == 5 + 6 + 7

%% markdown library
## 2. The library's version

> **To do:** import the module that your chapter is about, show that its source is the same idea,
> and prove it equal to what was made by hand. The index says that your chapter builds the modules
> that the next cell imports.

%% code library-source
from infer_lab import decode

print(inspect.getsource(decode.decode_step))

%% markdown library-text
It feeds a single token, and the cache holds the rest. Expect the same three tokens.

%% code library-equal
spec = CacheSpec.from_config(model.config, model.dtype)


def generate(max_tokens, **options):
    cache = ContiguousKVCache(spec, max_length=32, device=model.device)
    return list(decode.generate_tokens(model, prompt_ids, cache, max_tokens=max_tokens, **options))


assert generate(3) == by_hand
print("the same", len(by_hand), "tokens")

%% markdown measure
## 3. Measure it

> **To do:** predict first, then measure. Bytes and counts come out exactly: assert them. Times need
> a run that isn't counted, repeats, and their spread; tag such a cell `nbval-ignore-output`, and
> claim no more than you measured.

A token's keys and values take the same bytes wherever it stands. Expect a straight line.

%% code measure-bytes
from infer_lab import Trace

trace = Trace()
generate(3, trace=trace)
lengths = [record.cache_length for record in trace.records]
measured = [record.measured_bytes for record in trace.records]

print(dict(zip(lengths, measured)))
assert measured == [length * spec.bytes_per_token for length in lengths]

%% markdown figure-text
> **To do:** a figure has a title and units on its axes, and `alt` says what there is to see.
> Colours, markers and dashes of `viz.line` and `viz.bar` survive greyscale.

%% code figure
fig, ax = viz.figure(
    title="The cache grows by one token a step",
    xlabel="tokens in the cache",
    ylabel="keys and values (kB)",
)
ax.plot(lengths, [number / 1000 for number in measured], **viz.line(0))
ax.set_xticks(lengths)
ax.set_ylim(bottom=0)
alt = "A straight line from five to seven tokens: each token adds the same number of kilobytes."
viz.show(fig, alt=alt)

%% code seconds nbval-ignore-output
times = []
for _ in range(4):
    began = time.perf_counter()
    generate(3)
    times.append(1000 * (time.perf_counter() - began))
fastest, middle, slowest = sorted(times[1:])  # the first run isn't counted
print(f"3 tokens: {fastest:.0f} to {slowest:.0f} ms, middle run {middle:.0f} ms")

%% markdown back
## 4. Back to chapter 1

> **To do:** show where your idea sits in the first loop, with the same table.

One line per step, as in chapter 1:

%% code back-trace
print(trace.table())

%% markdown breaks
## 5. What breaks

> **To do:** provoke one realistic failure and explain it. Make fresh state in the cell, so that it
> can be run twice.

A step that is repeated after a time-out feeds its token twice. Same logits?

%% code breaks-twice
cache = ContiguousKVCache(spec, max_length=32, device=model.device)
prefill(model, prompt_ids, cache)
once = decode.decode_step(model, by_hand[0], cache)
twice = decode.decode_step(model, by_hand[0], cache)

print(len(prompt_ids) + 1, "tokens were meant,", cache.length, "are cached")
assert not torch.allclose(once, twice, atol=1e-3)

%% markdown exercises
The second token stands one position further, behind itself: another text. `cache.truncate` takes it
back.

## 6. Exercises

> **To do:** three to five, the easiest first. `checks.py` beside this notebook holds a check for
> each, with answers that it must reject, and `solutions.py` a solution with its reasons. Data is
> random and asymmetric: swapped axes must not pass.

Replace `raise NotImplementedError` by your code and run the cell. `check` names each property that
holds, and gives a counterexample for each that doesn't. Solutions with the reasoning are in
`solutions.py`, beside this notebook.

**Exercise 1: how long is the cache?** The prompt goes in at once, then one token a step. Three new
tokens take three steps.

%% code exercise-1
def cache_lengths(prompt_tokens, new_tokens):
    """List with one number for each step: tokens in the cache after it."""
    raise NotImplementedError


check(cache_lengths)

%% markdown exercise-2-text
**Exercise 2: how many bytes?** Keys and values of all layers, for a number of tokens.

%% code exercise-2
def cache_bytes(num_tokens, num_layers, num_kv_heads, head_size, bytes_per_number):
    """Bytes that the cache of num_tokens takes."""
    raise NotImplementedError


check(cache_bytes)

%% markdown exercise-3-text
**Exercise 3: which token is next?** A row of logits for each of the T tokens came out. Which id
does greedy choose?

%% code exercise-3
def next_token(logits):
    """logits (T, V) -> the id of the likeliest next token, an int; the lowest of equals."""
    raise NotImplementedError


check(next_token)

%% markdown engines
## 7. In real engines

> **To do:** say by file or class where vLLM, SGLang, llama.cpp or TensorRT-LLM do this, and what
> they do that you left out.

| here | there |
|---|---|
| `ContiguousKVCache` | **llama.cpp**, `src/llama-kv-cache.cpp`: `llama_kv_cache` |

What it does and we left out: many sequences in one cache, and memory in pages.

%% markdown questions
### Test yourself

Answer before you unfold.

**1.** An answer of n tokens follows a prompt of P. How many tokens does the cache hold at the end?

<details><summary>Answer</summary>

P + n − 1: the last token is chosen and never fed.

</details>

**2.** Twice as many KV heads, half as many query heads. What happens to the cache?

<details><summary>Answer</summary>

It doubles. Queries aren't kept, so their heads don't count.

</details>

**3.** Why does the loop by hand compute more tokens than the library's?

<details><summary>Answer</summary>

It brings the whole sequence again in every step. With a cache each token is computed once.

</details>
'''
