# Targets, which do all their own set-up:
#   make demo     train three shortly, draw and generate: runs/demo/index.html
#   make train    prepare data, train, evaluate; PE="expe expe-on-k rope": three
#   make explorer train five encodings; explorer.html runs them in a browser
#   make test     ruff and the quick tests
# A Python 3.11 or newer other than python3: make train PYTHON=python3.12

PYTHON ?= python3
PE     ?= expe
.DEFAULT_GOAL := help
.PHONY: help demo explorer train test

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "this needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=...")'
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python requirements.txt
	.venv/bin/pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

.venv/installed-dev: .venv/installed requirements-dev.txt
	.venv/bin/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

demo: .venv/installed
	.venv/bin/python -m lab.demo

explorer: .venv/installed
	.venv/bin/python -m web.explorer

# One run an encoding, under runs/; a run that was stopped goes on, and a complete one is left as it is.
expe_flags = --pe expe --l 24
expe-on-k_flags = --pe expe --l 24 --on k
train: .venv/installed
	@set -e; $(foreach pe,$(PE),\
	    .venv/bin/python train.py --preset mini $(or $($(pe)_flags),--pe $(pe)) --out runs/$(pe) $(if $(wildcard runs/$(pe)/config.json),--resume);) \
	.venv/bin/python eval.py $(addprefix runs/,$(PE)) --plot runs/loss.png

test: .venv/installed-dev
	.venv/bin/ruff check .
	.venv/bin/python -m pytest -q -n auto
