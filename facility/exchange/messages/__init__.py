"""Messages that cross a facility boundary: settings, manifests, reports, plans, signatures."""
