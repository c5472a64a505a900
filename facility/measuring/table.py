"""What was measured, as a table for people."""

from __future__ import annotations

from facility.measuring.profile import Profile


def profile_table(profile: Profile) -> str:
    """Devices, units of the model, and links."""
    raw = profile.to_json()
    lines = ["device                          slowdown  free memory  site"]
    for device in raw["devices"]:
        lines.append(
            f"{device['id']:<30}  {device['slowdown']:>8.2f}  {device['memory_bytes'] / 2**30:>7.1f} GiB  "
            f"{device['site']}"
        )
    lines.append("unit            count  forward   backward  of one sample;   parameters    kept a sample")
    for unit in raw["units"]:
        lines.append(
            f"{unit['kind']:<14}  {unit['count']:>5}  {unit['forward_ms'] + unit['forward_overhead_ms']:>7.2f} ms"
            f" {unit['backward_ms'] + unit['backward_overhead_ms']:>7.2f} ms"
            f"  {unit['parameter_bytes'] / 1e6:>20.2f} MB  {unit['stored_bytes'] / 1e6:>9.2f} MB"
        )
    rates = [v for row in raw["links"]["bandwidth_megabytes_per_second"] for v in row if v is not None]
    delays = [v for row in raw["links"]["latency_ms"] for v in row if v is not None]
    if rates:
        lines.append(
            f"links: {min(rates):.4g} to {max(rates):.4g} MB/s, latency {min(delays):.3g} to {max(delays):.3g} ms"
        )
    for link in raw["links"]["shared"]:
        lines.append(f"shared: {link['name']}, {link['bandwidth_megabytes_per_second']:.4g} MB/s together")
    return "\n".join(lines)
