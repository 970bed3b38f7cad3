# Which lanes are due: `.ci/run` sources this, in the root of the repository.
#
# .ci/paths names the paths that a lane depends on. .ci/passed has the commit at which it last passed whole. A lane is
# due if one of its paths has changed since, committed or not, or if that cannot be known.

lane_names() { # every lane, in the order of the table
    awk '!/^#/ && $1 != "every" { print $1 }' .ci/paths
}

lane_paths() { # lane_paths LANE: its git pathspecs, one in a line
    awk -v lane="$1" '$1 == lane || $1 == "every" { for (i = 2; i <= NF; i++) print $i }' .ci/paths
}

why_due() { # why_due LANE: prints the reason in one line, or nothing if the lane is not due
    local commit paths changes
    commit=$(awk -v lane="$1" '$1 == lane { print $2 }' .ci/passed 2>/dev/null) || true
    mapfile -t paths < <(lane_paths "$1")
    if [ -z "$commit" ]; then
        echo "no commit at which it passed is known"
    elif ! git cat-file -e "$commit^{commit}" 2>/dev/null; then
        echo "commit $commit, at which it passed, is not in this clone"
    else
        changes=$(git diff --name-only "$commit" -- "${paths[@]}" && git ls-files --others --exclude-standard -- "${paths[@]}") ||
            changes="(git cannot compare)"
        [ -z "$changes" ] || echo "changed since ${commit:0:8}: $(head -n 1 <<<"$changes") and $(($(wc -l <<<"$changes") - 1)) more"
    fi
}

clean_commit() { # the commit that the files here are those of, or nothing; .ci/passed may differ
    [ -n "$(git status --porcelain --untracked-files=all -- . ':!.ci/passed' 2>/dev/null || echo unknown)" ] || git rev-parse HEAD
}

check_paths() { # check_paths LANE COMMAND...: fails if pytest, called so, collects tests of files that do not make the lane due
    local lane=$1 collected outside paths
    shift
    collected=$("$@" --collect-only -q)
    mapfile -t paths < <(lane_paths "$lane")
    outside=$(comm -23 <(sed -n 's/::.*//p' <<<"$collected" | sort -u) <(git ls-files -- "${paths[@]}" | sort))
    [ -z "$outside" ] || { echo "tests of lane $lane in files that do not make it due:" $outside; return 1; }
}

write_passed() { # write_passed COMMIT LANE...: notes that these lanes passed whole at that commit
    local commit=$1 lane file
    file=$(mktemp)
    shift
    for lane in $(lane_names); do
        case " $* " in
        *" $lane "*) echo "$lane $commit" ;;
        *) awk -v lane="$lane" '$1 == lane' .ci/passed 2>/dev/null || true ;;
        esac
    done >"$file"
    cat "$file" >.ci/passed
    rm "$file"
}
