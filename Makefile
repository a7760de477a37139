# `make check` is what the hosted CI runs. ARGS go to pytest: make test ARGS="-k queue tests/unit".
.PHONY: help check test lint format pictures docs

help:
	@echo "check     lint and all tests, as the hosted CI does (as root it installs what tests need)"
	@echo "test      tests; ARGS go to pytest"
	@echo "lint      ruff, mypy, import contracts, diagrams"
	@echo "format    format the code"
	@echo "pictures  draw the diagrams of ARCHITECTURE.md again"
	@echo "docs      write the reference pages and build the site with mkdocs"

check:
	.ci/run

test:
	./test.sh $(ARGS)

lint:
	scripts/venv.sh
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	.venv/bin/codespell -D - -D scripts/words.txt policies provisioners lb skyserve_cli benchmarks docs examples scripts ./*.md
	.venv/bin/python scripts/pictures.py --check

format:
	scripts/venv.sh
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

pictures:
	scripts/venv.sh
	.venv/bin/python scripts/pictures.py

docs:
	scripts/venv.sh
	.venv/bin/python -m scripts.reference
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict
