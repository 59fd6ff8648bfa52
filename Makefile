# Targets; each installs what it needs into .venv first:
#   make setup      an environment for the scripts and the tests
#   make setup-all  and what some instruments need besides (transformers, lm_eval)
#   make train      prepare data, train, evaluate; PE="expe expe-on-k rope": three, JOBS=2 of them at a time;
#                   STEPS=200: short runs, as runs/NAME-steps-200
#   make task       train ExPE-K and RoPE on a small task; PE="fox alibi": others
#   make explorer   explorer.html: trained models of five encodings in your browser; TRAIN=1: train them anew
#   make test       ruff, the check ladder, and the other tests
# A Python 3.11 or newer other than python3: make setup PYTHON=python3.12

PYTHON ?= python3
PE     ?= expe
JOBS   ?= 2
trainings = $(addprefix train-,$(PE))
run     = runs/$(1)$(if $(STEPS),-steps-$(STEPS))
quote   = '$(subst ','\'',$(1))'
PIP     = .venv/bin/pip install --quiet --disable-pip-version-check
.DEFAULT_GOAL := help
.PHONY: help setup setup-all train $(trainings) task explorer test

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "this needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=...")'
	@echo "Creating .venv, a Python environment in this folder. Nothing is installed outside it."
	@$(PYTHON) -m venv .venv

# The .pth file lets python -m lab.measure, and the other instruments, be found from any folder. With a GPU the default
# preset reads FineWeb, through datatrove.
.venv/installed: .venv/bin/python requirements.txt requirements-dev.txt Makefile
	@echo "Downloading PyTorch and the other packages of requirements-dev.txt into .venv. The first time this takes some"
	@echo "minutes (3 on two busy cores), and prints nothing until it is done. On Linux PyTorch comes with NVIDIA's"
	@echo "libraries, which are some GB; make setup PYTHON=... chooses another Python."
	@$(PIP) -r requirements-dev.txt
	@echo ../../../.. >$$(echo .venv/lib/python3.*/site-packages)/expe-repository.pth
	@! command -v nvidia-smi >/dev/null || { \
	    echo "This machine has a GPU: downloading datatrove and what it needs, to read FineWeb (half a minute)."; \
	    $(PIP) $$(grep -E '^(datatrove|orjson|pyarrow|tokenizers)=' requirements-optional.txt); }
	@touch $@

.venv/installed-all: .venv/installed requirements-optional.txt
	@echo "Downloading transformers, lm_eval and the other packages of requirements-optional.txt into .venv. The first"
	@echo "time this takes some minutes."
	@$(PIP) -r requirements-optional.txt
	@touch $@

setup: .venv/installed
setup-all: .venv/installed-all
setup setup-all:
	@echo ".venv is ready. Next: make train (trains a small model in a few minutes), or make test; to call the scripts"
	@echo "yourself: source .venv/bin/activate, then python train.py --help. Models that are trained already:"
	@echo "make explorer (in your browser), or python -m web.models unpack (as runs, for the scripts)"

explorer: .venv/installed
	.venv/bin/python -m web.explorer $(if $(TRAIN),--train)

# One run an encoding, under runs/; a run that was stopped goes on, and a complete one is left as it is. STEPS makes
# runs of its own, NAME-steps-STEPS. Two runs at a time, with one thread each, take less time in all than one after the
# other with two threads; they print lines in place of bars, which would overwrite each other.
expe_flags = --pe expe --l 24
expe-on-k_flags = --pe expe --l 24 --on k
train: .venv/installed
	@$(if $(word 2,$(PE)),OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(if $(filter-out 1,$(JOBS)),TQDM_DISABLE=1)) \
	    $(MAKE) --no-print-directory --jobs $(call quote,$(JOBS)) $(foreach it,$(trainings),$(call quote,$(it)))
	@.venv/bin/python eval.py $(foreach pe,$(PE),$(call quote,$(call run,$(pe)))) --plot runs/loss.png
$(trainings): train-%:
	@.venv/bin/python train.py --preset mini $(or $($*_flags),--pe $(call quote,$*)) \
	    $(if $(STEPS),--steps $(call quote,$(STEPS))) --out $(call quote,$(call run,$*)) \
	    $(if $(wildcard $(call run,$*)/config.json),--resume)

# One minute: the first or the last letter of a text, trained at 64 tokens and read at up to 1,024.
task: PE = expe-on-k rope
task_flags = --preset mini --data task:first-last --context 64 --layers 2 --width 64 --heads 2 --batch-size 16 --steps 1500 --lr 1e-3
task: .venv/installed
	@set -e; $(foreach pe,$(PE),\
	    .venv/bin/python train.py $(task_flags) $(or $($(pe)_flags),--pe $(call quote,$(pe))) \
	        --out $(call quote,runs/task-$(pe)) $(if $(wildcard runs/task-$(pe)/config.json),--resume);) \
	.venv/bin/python eval.py $(foreach pe,$(PE),$(call quote,runs/task-$(pe)))

# The ladder first: after a wrong edit it speaks alone. What is marked slow is left out: pytest -m slow runs it.
test: .venv/installed
	@files=$$(git ls-files '*.py' '*.ipynb' 2>/dev/null); .venv/bin/ruff check $${files:-.}           # not what lies beside them
	.venv/bin/python -m pytest -q -x -n auto --tb=line tests/test_ladder.py
	.venv/bin/python -m pytest -q -n auto --dist worksteal --ignore tests/test_ladder.py
