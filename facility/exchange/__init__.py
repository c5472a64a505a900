"""What crosses a facility's boundary, and nothing else: the agreement between facility and coordinator.

Every file that travels is described by a module here, with a format version. Modules import no torch at import
time, so that planners and checks start quickly.
"""
