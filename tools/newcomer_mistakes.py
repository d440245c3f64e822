"""What a newcomer types wrong: the command, the exit status it should end with, and what it should say."""

from __future__ import annotations

from dataclasses import dataclass

RELEASED = "google/diffusiongemma-26B-A4B-it"
ON_HUB = "someone/tiny"  # what the hub at $HUB, on loopback, has
UNREACHABLE = "HF_ENDPOINT=http://127.0.0.1:9"


@dataclass(frozen=True)
class Mistake:
    """says: a regular expression that stdout and stderr together must contain.

    interrupt_at: Ctrl-C is typed when this has been printed. extra: the packages that are taken away before,
    as if they had not been installed.
    """

    what: str
    command: str
    status: int
    says: str
    interrupt_at: str | None = None
    extra: tuple[str, ...] = ()


# Typed once before the mistakes, in the same directory.
PREPARED = r"""
dgemma new tiny --preset tiny
cp -r tiny truncated && truncate -s 300000 truncated/model.safetensors
cp -r tiny noise && head -c 4000 /dev/urandom > noise/model.safetensors
cp -r tiny shards && rm shards/model.safetensors
echo '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}' > shards/model.safetensors.index.json
mkdir pickle llama ro small
cp tiny/config.json pickle && echo x > pickle/pytorch_model.bin
echo '{"model_type": "llama", "hidden_size": 64}' > llama/config.json
printf 'caf\xe9\n' > latin.txt
printf 'Every mornign Emma gave the dog some water.\n' > note.txt
printf '{"a": 1}\n' > other.jsonl
printf '{"prompt": "x", \n' > half.jsonl
printf '{"type": "obj' > half-schema.json
printf '{"prompt": "Capital of %s?", "response": "%s"}\n' France Paris Spain Madrid > facts.jsonl
dgemma train model=bundled:text data=facts.jsonl data.max_length=40 out=runs/facts steps=2 batch=2
"""
_TAKEN = (
    "python -m http.server 8123 --bind 127.0.0.1 > /dev/null 2>&1 & other=$!; sleep 2; "
    "dgemma serve bundled:text --port 8123; status=$?; kill $other; exit $status"
)
_GUARDED = (
    "DGEMMA_API_KEY=secret dgemma serve bundled:text --port 8124 --log-format json > log 2>&1 & server=$!; "
    "until grep -q listening log; do sleep 1; kill -0 $server; done; "
    "curl -s http://127.0.0.1:8124/v1/models; {more}kill $server; wait $server"
)

MISTAKES = (
    # What is typed
    Mistake("a misspelt command", "dgemma genrate bundled:text Hello", 2, "did you mean 'generate'"),
    Mistake("a misspelt option", "dgemma generate bundled:text Hello --sede 3", 2, "did you mean '--seed'"),
    Mistake("no model", "dgemma generate", 2, "arguments are required: MODEL"),
    Mistake("a prompt in place of the model", "dgemma generate 'Tell me a joke'", 2, "taken for MODEL"),
    Mistake(
        "options before the prompt (no mistake)",
        "dgemma generate --seed 1 bundled:text --max-tokens 4 'On Sunday' --raw",
        0,
        r"\w",
    ),
    Mistake("an empty prompt", "dgemma generate bundled:text ''", 2, "it must hold some text"),
    Mistake("a seed that is no number", "dgemma generate bundled:text Hi --seed abc", 2, "--seed.*'abc'"),
    Mistake(
        "no token at all", "dgemma generate bundled:text Hi --max-tokens 0", 2, "max_tokens is 0.*at least 1"
    ),
    Mistake(
        "more tokens than fit",
        "dgemma generate bundled:text Hi --max-tokens 9999999",
        2,
        "context leaves 40.*[Ll]ower",
    ),
    Mistake(
        "a canvas that is too long",
        "dgemma generate bundled:text Hi --canvas-len 9999",
        2,
        "canvas_len is 9999.*32 tokens",
    ),
    Mistake(
        "a bad temperature", "dgemma generate bundled:text Hi --temperature -1", 2, "number from 0 to 100"
    ),
    Mistake(
        "a bad regular expression", "dgemma generate bundled:text Hi --regex '(a'", 2, r"without its `\)`"
    ),
    Mistake(
        "a bad JSON schema",
        'dgemma generate bundled:text Hi --json-schema \'{"type": "strng"}\'',
        2,
        "did you mean 'string'",
    ),
    Mistake(
        "a schema that is no JSON",
        "dgemma generate bundled:text Hi --json-schema half-schema.json",
        2,
        "half-schema.json.*JSON",
    ),
    Mistake("a GPU that is not there", "dgemma generate bundled:text Hi --device cuda", 1, "dgemma doctor"),
    # Models and files
    Mistake("a wrong path", "dgemma generate ./no-such-model Hello", 1, "no-such-model does not exist"),
    Mistake("a GGUF file that is not there", "dgemma info nowhere.gguf", 1, "nowhere.gguf does not exist"),
    Mistake("a misspelt bundled model", "dgemma run bundled:txt", 1, "did you mean 'text'"),
    Mistake(
        "a hub name, offline", f"HF_HUB_OFFLINE=1 dgemma run {RELEASED} Hello", 1, "HF_HUB_OFFLINE is set"
    ),
    Mistake(
        "a hub that cannot be reached",
        f"{UNREACHABLE} dgemma run {RELEASED} Hi",
        1,
        "cannot be reached.*network",
    ),
    Mistake("another kind of model", "dgemma info llama", 1, "model_type is 'llama'.*supports only"),
    Mistake("a pickle checkpoint", "dgemma generate pickle Hello", 1, "pickle file.*convert it first"),
    Mistake("a missing shard", "dgemma generate shards Hello", 1, "00001-of-00002.*does not exist"),
    Mistake("a truncated file", "dgemma generate truncated Hello", 1, "is truncated.*Download it again"),
    Mistake("a file of noise", "dgemma generate noise Hello", 1, "not a safetensors file"),
    Mistake(
        "an adapter that is not there",
        "dgemma generate bundled:text Hi --adapter no",
        1,
        "adapter_config.json",
    ),
    Mistake(
        "the adapter of another model",
        "dgemma generate bundled:sudoku Hi --raw --adapter runs/facts/adapter",
        1,
        "adapter",
    ),
    Mistake(
        "an image that is not there",
        "dgemma generate bundled:text Hi --image no.jpg",
        2,
        r"no.jpg cannot be read|dgemma\[vision\]",  # which is said first
    ),
    Mistake("text that is not UTF-8", "dgemma edit latin.txt ''", 2, "latin.txt is not UTF-8.*iconv"),
    Mistake(
        "a prompt that is not UTF-8", "cat latin.txt | dgemma generate bundled:text", 2, "not UTF-8.*iconv"
    ),
    Mistake("a trace that is none", "dgemma trace show other.jsonl", 2, "other.jsonl, line 1: not a trace"),
    Mistake("no puzzle", "dgemma solve 53..7", 2, "neither 81 cells nor a file"),
    Mistake(
        "training data that is not there",
        "dgemma train model=bundled:text data=no.jsonl out=x",
        2,
        "no.jsonl",
    ),
    Mistake(
        "half a line of training data",
        "dgemma train model=bundled:text data=half.jsonl out=x",
        2,
        "half.jsonl:1: the line is not JSON",
    ),
    Mistake("a misspelt name of a recipe", "dgemma train model=bundled:text dta=x", 2, "did you mean 'data'"),
    Mistake("an output that exists", "dgemma new tiny --preset tiny", 1, "already holds a checkpoint"),
    # The machine
    Mistake(
        "out of memory",
        "ulimit -v 1900000; dgemma new medium --preset medium > /dev/null 2>&1; "
        "prlimit --as=1500000000 dgemma generate medium Hello --max-tokens 4",
        1,
        "out of memory.*smaller weights",
    ),
    Mistake(
        "a read-only directory",
        "unshare -rm bash -c 'mount -t tmpfs -o ro none ro && "
        "dgemma generate tiny Hi --raw --max-tokens 4 --trace ro/a.trace'",
        2,
        "Read-only file system",
    ),
    Mistake(
        "a checkpoint into a read-only directory",
        "unshare -rm bash -c 'mount -t tmpfs -o ro none ro && dgemma new ro/model --preset tiny'",
        1,
        "Read-only file system",
    ),
    Mistake(
        "a full disk",
        "unshare -rm bash -c 'mount -t tmpfs -o size=400k none small && "
        "dgemma new small/model --preset tiny'",
        1,
        "free",
    ),
    Mistake("output to a full disk", "dgemma info bundled:text > /dev/full", 1, "No space left on device"),
    Mistake(
        "a cache that cannot be written",
        "unshare -rm bash -c 'mount -t tmpfs -o ro none ro && "
        f"HF_ENDPOINT=$HUB HF_HOME=ro/cache dgemma pull {ON_HUB}'",
        1,
        "cannot be written: Read-only file system.*HF_HOME",
    ),
    Mistake(
        "a cache on a full disk",
        "unshare -rm bash -c 'mount -t tmpfs -o size=100k none small && "
        f"HF_ENDPOINT=$HUB HF_HOME=small/cache dgemma pull {ON_HUB}'",
        1,
        r"needs 220\.1 kB, .* has 102\.4 kB free",
    ),
    Mistake("a closed pipe (no mistake)", "dgemma info bundled:text | head -1", 0, "geometry"),
    Mistake(
        "Ctrl-C while it answers",
        "dgemma generate bundled:text 'On Sunday' --raw --max-tokens 3000 --seed 1",
        130,
        r"^ ?\w.*generate: interrupted\n$",  # what it had written stays
        interrupt_at=r"\w{3}",
    ),
    Mistake(
        "Ctrl-C while it serves",
        "dgemma serve bundled:text --port 8125 --log-format text",  # as on a terminal
        0,
        "serving",
        interrupt_at="serving",
    ),
    Mistake("a port that is taken", _TAKEN, 2, "port 8123.*in use.*another --host or --port"),
    Mistake("a port that is none", "dgemma serve bundled:text --port 99999", 2, "from 0 to 65535"),
    Mistake("a key on the command line", "dgemma serve bundled:text --api-key x", 2, "--api-key-file"),
    Mistake("no API key", _GUARDED.format(more=""), 0, "invalid_api_key|API key"),
    Mistake(
        "no API key, from the command line",
        _GUARDED.format(more="dgemma bench --server http://127.0.0.1:8124 --requests 1; "),
        0,
        "401.*give an API key",
    ),
    Mistake(
        "a server that does not run",
        "dgemma bench --server http://127.0.0.1:9 --requests 1",
        2,
        "does not answer.*start the server",
    ),
    # Packages that were not installed
    Mistake(
        "no Pillow",
        "dgemma generate bundled:text Hi --image note.txt",
        2,
        r"dgemma\[vision\]",
        extra=("pillow",),
    ),
    Mistake(
        "no matplotlib",
        "dgemma bench bundled:text --svg a.svg --time-limit 1 --no-reference",
        2,
        r"dgemma\[plot\]",
        extra=("matplotlib",),
    ),
    Mistake("no lm-eval", "dgemma eval bundled:text gsm8k", 2, r"dgemma\[eval\]|sudoku", extra=("lm-eval",)),
    Mistake("no FastAPI", "dgemma serve bundled:text", 2, r"dgemma\[server\]", extra=("fastapi", "uvicorn")),
    Mistake(
        "no pydantic",
        "dgemma train model=bundled:text data=facts.jsonl out=x",
        2,
        r"dgemma\[train\]",
        extra=("pydantic",),
    ),
)
