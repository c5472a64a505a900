"""The planning problem: devices, links, units and objective. Read by planning and simulation alike."""
