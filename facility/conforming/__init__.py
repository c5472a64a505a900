"""The parts of `facility.conformance`: runs a trainer on pico material, and checks what it leaves."""
