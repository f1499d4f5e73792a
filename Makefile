# Targets: build test test-long bench lint fmt clean. See CONTRIBUTING.md.

GO        ?= go
VERSION   ?= $(shell git describe --tags --always --dirty 2>/dev/null)
LDFLAGS    = -s -w -X main.version=$(VERSION)
# One test binary at a time: the suites measure times and make file systems of
# their own, and get in each other's way on two cores.
TESTFLAGS ?= -p 2

.PHONY: build test test-long bench lint fmt clean

# One static binary. The library of the btrfs driver needs cgo: without a C
# compiler the binary has every driver but that.
ifneq ($(shell command -v gcc),)
STATIC = CGO_ENABLED=1 $(GO) build -tags netgo,osusergo -ldflags '$(LDFLAGS) -linkmode external -extldflags -static'
else
STATIC = CGO_ENABLED=0 $(GO) build -ldflags '$(LDFLAGS)'
endif
build:
	$(STATIC) -trimpath -o bin/agentenv ./cmd/agentenv

# Less than ten minutes on two cores. What cannot run here skips with its reason;
# as root all runs.
test:
	$(GO) vet ./...
	$(GO) test $(TESTFLAGS) ./...

# Everything, the slow ones included: more than half an hour on two cores.
test-long:
	AGENTENV_TEST_LONG=1 $(GO) test $(TESTFLAGS) -timeout 90m ./...

# Our figures, the baselines' and their ratios, from one run. Some 15 minutes,
# and 10 GB below TMPDIR; as root also on XFS and btrfs volumes.
bench: build
	cd cmd/agentenv && AGENTENV=$(CURDIR)/bin/agentenv $(GO) test -count 1 -timeout 60m -run '^TestFigures$$'

lint:
	test -z "$$(gofmt -l .)"
	$(GO) vet ./...
	GOOS=darwin $(GO) vet ./cmd/... ./specs/...
	GOOS=windows $(GO) vet ./cmd/... ./specs/...
	$(GO) run honnef.co/go/tools/cmd/staticcheck@v0.8.2 ./...

fmt:
	gofmt -w .

clean:
	rm -rf bin dist
