# Parts of a run, in lanes that run side by side: `.ci/run` sources this.
#
#   part NAME SECONDS COMMAND...   runs a command, for so long at most; only inside a lane
#   side_by_side LANE...           runs functions that run parts; the first part that fails ends all and the script
#   print_parts                    prints how long each part took

logs=$(mktemp -d)
lanes=()
running=

count_cpu() { # sets cpu_s to the CPU seconds of all processes that this shell has waited for
    local file=$logs/.times.$BASHPID
    times >"$file" # in a pipe or a substitution it would be that of another shell
    cpu_s=$(awk -F'[ms ]' 'NR == 2 { printf "%d", $1 * 60 + $2 + $4 * 60 + $5 }' "$file")
}

part() { # part NAME SECONDS COMMAND...: prints the output when it ends, so that two lanes do not mix theirs
    local limit=$2 status=0 started=$SECONDS cpu_s cpu_before_s
    name=$1
    shift 2
    count_cpu
    cpu_before_s=$cpu_s
    {
        flock 9
        printf '\n==> %s: %s\n' "$name" "$*"
    } 9>"$logs/.lock"
    timeout --kill-after=30 "$limit" "$@" >"$logs/$name" 2>&1 </dev/null &
    running=$!
    wait "$running" || status=$?
    running=
    count_cpu
    {
        flock 9
        printf '\n==> output of %s:\n' "$name"
        cat "$logs/$name"
        case $status in
        0)
            printf '==> %s: passed in %s s\n' "$name" "$((SECONDS - started))"
            printf '%-24s %6d %6d\n' "$name" "$((SECONDS - started))" "$((cpu_s - cpu_before_s))" >>"$logs/.parts"
            ;;
        124) printf '==> %s: stopped after %s s\n' "$name" "$limit" ;;
        *) printf '==> %s: failed with exit status %s\n' "$name" "$status" ;;
        esac
    } 9>"$logs/.lock"
    return "$status"
}

print_parts() { # parts in the order in which they ended; processes that nobody waited for, such as Ray's, are not in CPU-s
    printf '\n==> %-20s %6s %6s\n' part s CPU-s
    cat "$logs/.parts"
    awk '{ s += $NF } END { printf "%-31s %6d\n", "sum", s }' "$logs/.parts"
}

side_by_side() { # side_by_side LANE...
    local lane
    for lane in "$@"; do
        (
            set -m # each part is a process group of its own, in which SIGINT works as in the foreground
            trap - EXIT INT
            trap 'end_part; exit 143' TERM HUP
            "$lane"
        ) &
        lanes+=($!)
    done
    while [ ${#lanes[@]} -gt 0 ]; do # not `wait -n`, which misses a lane that ended while another was waited for
        for lane in "${!lanes[@]}"; do
            kill -0 "${lanes[lane]}" 2>/dev/null && continue
            wait "${lanes[lane]}"
            unset "lanes[lane]"
        done
        sleep 0.5
    done
}

end_part() { # ends the part that this lane runs, as Ctrl-C does: pytest tells what has failed until then
    [ -n "$running" ] || return 0
    # once to each process: `timeout` passes it on twice, and pytest is then interrupted while it tells
    pgrep -g "$running" | grep -vx "$running" | xargs -r kill -INT 2>/dev/null || true
    timeout 30 tail -f /dev/null --pid="$running" || kill -KILL -- "-$running" 2>/dev/null || true
    wait "$running" || true
    printf '\n==> %s: ended before it was finished; its errors and last lines:\n' "$name"
    grep -aE '^(E  |FAILED|ERROR)' "$logs/$name" | head -n 40 || true
    tail -n 20 "$logs/$name"
}

end_lanes() {
    local status=$?
    trap '' INT TERM HUP # a second Ctrl-C does not leave parts behind
    [ ${#lanes[@]} -eq 0 ] || kill -TERM "${lanes[@]}" 2>/dev/null || true
    wait
    rm -rf "$logs"
    [ "$status" -eq 0 ] || printf '\n==> failed with exit status %s after %s s\n' "$status" "$SECONDS" >&2
    exit "$status"
}
trap end_lanes EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
