"""Parts for tests and examples: model makers, conformance suites, fault layers."""
