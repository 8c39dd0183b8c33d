"""The conformance kit: what proves a backend, any vendor's, against the contract."""
